"""The models that are measured, and a decode loop that times itself step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvobs.lab.demo._cache import NAME, damage_of, models_directory

PROMPT_TOKENS = 32
_SETTLE = 2  # the first decode steps of a call still warm up
TINY = "tiny Llama (30 layers, hidden 64)"
SMOLLM2 = "SmolLM2-135M"
MISSING = "SmolLM2 is not in the demo's cache; kvobs demo prepares it."


class Times(msgspec.Struct):
    """Decode steps of one generate call: main-thread CPU and wall nanoseconds, and how many steps."""

    cpu_ns: int
    wall_ns: int
    steps: int


class Engine:
    """A model with a fixed prompt; ``decode`` is greedy and always as long as asked."""

    def __init__(self, name: str, model: Any, budget: float) -> None:
        """``budget`` is kvobs's share of a decode step in per cent."""
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.name, self.model, self.budget = name, model.eval(), budget
        self._ids = torch.randint(5, 1_000, (1, PROMPT_TOKENS))
        self._goes_on = torch.zeros(1, dtype=torch.bool)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0

    def decode(self, steps: int) -> Times:
        """Generate from the prompt and time the decode steps after the first two."""
        cpu: list[int] = []
        wall: list[int] = []

        def stamp(*_: Any, **__: Any) -> Any:
            cpu.append(time.thread_time_ns())
            wall.append(time.perf_counter_ns())
            return self._goes_on

        self.model.generate(self._ids, max_new_tokens=steps + _SETTLE + 1, do_sample=False, stopping_criteria=[stamp])
        return Times(cpu[-1] - cpu[_SETTLE], wall[-1] - wall[_SETTLE], len(cpu) - 1 - _SETTLE)

    def steps_cpu_ns(self, prepare: Sequence[Callable[[], object]]) -> list[int]:
        """Main-thread CPU nanoseconds of one decode step for each of ``prepare``, which is called before its step."""
        cpu: list[tuple[int, int]] = []

        def stamp(*_: Any, **__: Any) -> Any:
            ended, number = time.thread_time_ns(), len(cpu) - _SETTLE
            if 0 <= number < len(prepare):
                prepare[number]()
            cpu.append((ended, time.thread_time_ns()))
            return self._goes_on

        self.model.generate(self._ids, max_new_tokens=len(prepare) + _SETTLE + 1, do_sample=False,
                            stopping_criteria=[stamp])
        return [after[0] - before[1] for before, after in zip(cpu[_SETTLE:], cpu[_SETTLE + 1:], strict=False)]


def tiny() -> Engine:
    """As many layers as SmolLM2 with next to no arithmetic: the hardest case for a sweep over layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=30, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=1024, max_position_embeddings=2048)
    return Engine(TINY, LlamaForCausalLM(config), 1.5)


def smollm2() -> Engine | None:
    """The demo's model, when the demo has prepared it."""
    directory = models_directory() / NAME
    if damage_of(directory):
        return None
    from transformers import AutoModelForCausalLM

    return Engine(SMOLLM2, AutoModelForCausalLM.from_pretrained(directory, local_files_only=True), 1.0)


def engines() -> Iterator[tuple[str, float, Engine | None]]:
    """Each model's name, its budget in per cent, and the model or None when it is missing."""
    yield TINY, 1.5, tiny()
    yield SMOLLM2, 1.0, smollm2()
