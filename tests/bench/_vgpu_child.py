"""Decoding on the CPU and on the virtual GPU, in a process of its own: torch cannot take a device type back."""

from __future__ import annotations

import json
import sys
import time
from array import array
from typing import Any

import kvobs.virtual
from kvobs.virtual import _setup
from tests.bench._engines import PROMPT_TOKENS, SMOLLM2, TINY, smollm2, tiny

_SIZES = (512, 4096, 1536, 65_536, 23_040, 262_144, 1 << 20, 3 << 20, 100_000, 12 << 20)


def _decode(model: Any, device: str, steps: int) -> int:
    """Nanoseconds of the main thread's CPU for a prompt and so many tokens."""
    import torch

    torch.manual_seed(1)
    ids = torch.randint(5, 1_000, (1, PROMPT_TOKENS)).to(device)
    began = time.thread_time_ns()
    model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
    return time.thread_time_ns() - began


def _models(name: str, rounds: int, steps: int) -> dict[str, list[int]] | None:
    engine, other = (tiny(), tiny()) if name == TINY else (smollm2(), smollm2())
    if engine is None or other is None:
        return None
    models = {"cpu": engine.model, "vgpu": other.model.to("vgpu"), "again": engine.model}
    found: dict[str, list[int]] = {key: [] for key in models}
    for number in range(rounds + 1):
        for key in sorted(models, reverse=bool(number % 2)):
            took = _decode(models[key], "vgpu" if key == "vgpu" else "cpu", steps)
            if number:  # the first round warms up
                found[key].append(took)
    return found


def main() -> None:
    rounds, steps = json.loads(sys.argv[1])
    kvobs.virtual.setup(["4GiB"])
    library = _setup._library_of_process
    assert library is not None
    sizes = array("Q", _SIZES)
    pairs = [library.measure(0, 200_000, sizes.buffer_info()[0], len(sizes)) for _ in range(rounds)]
    told = {"pairs_ns": pairs, **{name: _models(name, rounds, steps) for name in (TINY, SMOLLM2)}}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
