"""The model that is served, and its conversations: SmolLM2 from a directory, else its shape with random weights."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The configuration of SmolLM2-135M; the tiny one rehearses the same steps within seconds on a CPU.
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
           "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
           "tie_word_embeddings": True}
TINY = SMOLLM2 | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "num_key_value_heads": 4, "vocab_size": 512}
DTYPE = "bfloat16"


@dataclass
class Served:
    """A model on a device. ``tokenizer`` is None where token ids are made up."""

    what: str
    model: Any
    tokenizer: Any
    cache_argument: str
    kv_token_bytes: int
    vocabulary: int


@dataclass
class Conversation:
    """One session: its cache, the tokens in it, and what was said."""

    served: Served
    number: int
    cache: Any
    tokens: list[int] = field(default_factory=list)
    _messages: list[dict[str, str]] = field(default_factory=list)
    _seen: str = ""

    def say(self, line: str, made_up: int, new_tokens: int) -> int:
        """Answer a line, or ``made_up`` tokens where there is none or no tokenizer; returns how many were generated."""
        import torch

        served = self.served
        prompt, new = self._prompt(line, made_up)
        ids = torch.tensor([self.tokens + new], device=served.model.device)
        with torch.no_grad():
            output = served.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens,
                **{served.cache_argument: self.cache})
        told: list[int] = output[0].tolist()
        reply = told[len(self.tokens) + len(new):]
        if served.tokenizer is not None and line:
            text = served.tokenizer.decode(reply, skip_special_tokens=True)
            self._messages += [{"role": "user", "content": line}, {"role": "assistant", "content": text}]
            self._seen = prompt + text
        self.tokens = told
        return len(reply)

    def held_bytes(self) -> int:
        """KV bytes of the tokens in the cache, in closed form."""
        return int(self.cache.get_seq_length()) * self.served.kv_token_bytes

    def _prompt(self, line: str, made_up: int) -> tuple[str, list[int]]:
        tokenizer = self.served.tokenizer
        if tokenizer is None or not line:
            draw = random.Random(f"{self.number} {len(self.tokens)} {line}")
            return "", [draw.randrange(3, self.served.vocabulary) for _ in range(made_up)]
        prompt: str = tokenizer.apply_chat_template([*self._messages, {"role": "user", "content": line}],
                                                    tokenize=False, add_generation_prompt=True)
        return prompt, tokenizer(prompt[len(self._seen):], add_special_tokens=False)["input_ids"]


def lines(turn: int) -> str:
    """What the user says in a turn: the demo's lines, over and over."""
    from kvobs.lab.demo._script import LINES

    return LINES[turn % len(LINES)]


def conversation(served: Served, number: int) -> Conversation:
    """A new session."""
    from transformers import DynamicCache

    return Conversation(served, number, DynamicCache(config=served.model.config))


def load(device: Any, directory: Path | None, tiny: bool) -> Served:
    """The model on a device, in bf16, made on the CPU and then moved, as applications do."""
    import inspect

    import torch

    tokenizer = None
    if directory is not None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, DTYPE), local_files_only=True)
        what = directory.name
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**(TINY if tiny else SMOLLM2))).to(getattr(torch, DTYPE))
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        what = f"random weights, {'a tiny Llama' if tiny else 'the shape of SmolLM2-135M'}, made-up tokens"
    model = model.eval().to(device)
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    accepted = inspect.signature(type(model).forward).parameters
    return Served(what, model, tokenizer, "cache" if "cache" in accepted else "past_key_values",
                  2 * config.num_hidden_layers * config.num_key_value_heads * head * 2, config.vocab_size)
