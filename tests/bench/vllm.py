"""A real vLLM engine on the CPU with and without kvobs: batches in random order, compared within each round.

The pool is so small that requests are preempted, which is when the hooks have most to do. A throughput, or a time per
token, at least 0.99 of that without kvobs is an overhead of at most 1.01 %.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvobs.lab.demo import _vllm_env
from kvobs.lab.demo._cache import NAME, damage_of, models_directory
from tests.bench._engines import MISSING, SMOLLM2
from tests.bench._rows import Plan, Progress, Row, overhead, repeated, skipped
from tests.bench._statistics import median
from tests.bench._vllm_child import AGAIN, OFF, ON, REQUESTS, WARM

ROOT = Path(__file__).resolve().parent.parent.parent
VARIABLE = "KVOBS_TEST_VLLM"
GROUP = "vLLM on the CPU, 8 requests at once, against no kvobs"
TINY = "tiny random Llama (2 layers)"
BUDGET = 1.01
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 128,
          "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
          "vocab_size": 1024, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}
KINDS = {"wall": "time per token (the inverse of throughput), wall clock",
         "tpot": "time per token after a request's first, wall clock", "cpu": "time per token, main-thread CPU"}


def python() -> Path | None:
    """A Python with vLLM: the one that is named, else that of the demo's environment."""
    named = os.environ.get(VARIABLE, "").partition(":")[0]
    if named:
        return Path(named)
    place = _vllm_env.default_directory()
    return _vllm_env.python_of(place) if _vllm_env.look(place).ready else None


def _ran(interpreter: Path, given: dict[str, Any], progress: Progress) -> dict[str, Any]:
    done = progress((given["rounds"] + WARM) * 3)
    environ = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [str(interpreter), "-P", "-m", "tests.bench._vllm_child", json.dumps(given)]
    with subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, cwd=ROOT, text=True) as child:
        assert child.stdout is not None
        last = ""
        for line in child.stdout:
            last = line
            if line == ".\n":
                done()
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {child.returncode}.")
    found: dict[str, Any] = json.loads(last)
    return found


def _rows(name: str, interpreter: Path, given: dict[str, Any], progress: Progress) -> Iterator[Row]:
    told = _ran(interpreter, given, progress)
    arms, label = told["arms"], f"vLLM {told['version']}, {name}"
    for kind, what in KINDS.items():
        yield overhead(GROUP, f"{label}: {what}", arms[ON][kind], arms[OFF][kind], arms[AGAIN][kind], budget=BUDGET)
    step_ms = median(arms[OFF]["wall"]) * REQUESTS * given["tokens"] / told["steps"] / 1e6
    yield repeated(GROUP, f"{label}: the hooks' own time per step", told["hook_ns"], "µs", scale=1e-3,
                   note=f"by their own clock; a step takes {step_ms:.1f} ms")


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    """In processes of the environment with vLLM."""
    interpreter = python()
    if interpreter is None:
        yield skipped(GROUP, "throughput and time per token",
                      f"{VARIABLE} names no Python with vLLM, and kvobs demo --engine vllm has made no environment.",
                      unit="%", budget=BUDGET)
        return
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        Path(directory, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        yield from _rows(TINY, interpreter, {"model": directory, "format": "dummy", "rounds": plan.rounds(24, 4),
                                             "tokens": 64, "blocks": 22}, progress)
    model = models_directory() / NAME
    if damage_of(model):
        yield skipped(GROUP, f"{SMOLLM2}: throughput and time per token", MISSING, unit="%", budget=BUDGET)
        return
    yield from _rows(SMOLLM2, interpreter, {"model": str(model), "format": "auto", "rounds": plan.rounds(10, 2),
                                            "tokens": 32, "blocks": 20}, progress)
