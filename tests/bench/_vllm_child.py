"""A real vLLM on the CPU with and without kvobs, in a process of a Python that has vLLM; its argument is JSON."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import kvobs

OFF, AGAIN, ON = "off", "off again", "on"
REQUESTS, PROMPT, BLOCK = 8, 40, 32
WARM = 2  # rounds before those that count


@contextlib.contextmanager
def arm(name: str) -> Iterator[Any]:
    """The process in that state: without kvobs, or with it as it starts by default."""
    gc.collect()
    if name != ON:
        yield None
        return
    with (tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory,
          kvobs.instrument(store=directory, prometheus="127.0.0.1:0") as handle):
        handle.flush()  # the store's first commit makes its schema: a cost of starting, not of observing
        yield handle


def hooks(handle: Any) -> tuple[float, float]:
    """Seconds that the hooks in vLLM took, and how many steps they saw."""
    handle.flush()
    spent = steps = 0.0
    for row, points in handle.runtime.metrics.collect():
        for attributes, value in points.items():
            if row.name == "kvobs.self.hook.duration" and attributes == ("vllm",):
                spent += value
            if row.name == "kvobs.step.duration":
                steps += sum(value.counts)
    return spent, steps


def serve(engine: Any, tokens: int, number: int) -> dict[str, float]:
    """One batch: CPU and wall nanoseconds per token, and mean wall nanoseconds per token after a request's first."""
    sampling = importlib.import_module("vllm").SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    draw = random.Random(1)
    for one in range(REQUESTS):
        engine.add_request(f"{number}-{one}", {"prompt_token_ids": [draw.randrange(5, 500) for _ in range(PROMPT)]},
                           sampling)
    first: dict[str, int] = {}
    later = []
    cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
    while engine.has_unfinished_requests():
        for output in engine.step():
            now = time.perf_counter_ns()
            first.setdefault(output.request_id, now)
            if output.finished:
                later.append((now - first[output.request_id]) / (tokens - 1))
    made = REQUESTS * tokens
    return {"cpu": (time.thread_time_ns() - cpu) / made, "wall": (time.perf_counter_ns() - wall) / made,
            "tpot": sum(later) / len(later)}


def main() -> None:
    given = json.loads(sys.argv[1])
    rounds, tokens = given["rounds"], given["tokens"]
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(model=given["model"], load_format=given["format"], dtype="float32", skip_tokenizer_init=True,
                   max_model_len=256, max_num_seqs=REQUESTS, block_size=BLOCK, num_gpu_blocks_override=given["blocks"],
                   kv_cache_memory_bytes=64 << 20, enable_prefix_caching=True, enforce_eager=True,
                   disable_log_stats=False)
    found: dict[str, Any] = {name: {"cpu": [], "wall": [], "tpot": []} for name in (OFF, AGAIN, ON)}
    spent: list[float] = []
    steps, draw, number = 0.0, random.Random(2), 0
    for turn in range(rounds + WARM):
        for name in draw.sample(sorted(found), len(found)):
            llm.reset_prefix_cache()  # the same work for all
            number += 1
            with arm(name) as handle:
                took = serve(llm.llm_engine, tokens, number)
                if handle is not None and turn >= WARM:
                    seconds, steps = hooks(handle)
                    spent.append(1e9 * seconds / steps)
            for kind, value in took.items():
                if turn >= WARM:
                    found[name][kind].append(value)
            print(".", flush=True)
    print(json.dumps({"version": vllm.__version__, "arms": found, "hook_ns": spent, "steps": steps}))


if __name__ == "__main__":
    main()
