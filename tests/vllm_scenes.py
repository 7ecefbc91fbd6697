"""Scenes on vLLM's real engine, in one process; writes what was seen as JSON. Runs in the Python that has vLLM.

The pool, the batch and the lengths of the first scene are those of the reference run (block size 32, 24 blocks, 8
requests of 71 tokens that generate 100): 4 preemptions, 29 evictions and 101 failed allocations.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

import kvobs
from tests.vllm_account import BOOKS, LOG, Account
from tests.vllm_stage import (
    BLOCKS,
    HERE,
    SIZE,
    Steps,
    attributes,
    availability,
    engine,
    events,
    generate,
    greedy,
    points,
    prompt,
    spans,
    stored,
    tiny,
    told,
    watch_everything,
)

LONGEST = SIZE * (BLOCKS - 1)  # more tokens would not fit into the pool, and vLLM says so when it starts
PROMPTS = [prompt(71, seed, shared=20) for seed in range(8)]


def pressure() -> dict[str, Any]:
    """The reference run, observed from before the engine exists; the same again unobserved."""
    before = attributes()
    directory = str(HERE / "store")
    handle = kvobs.instrument(store=directory, prometheus="off", overhead_percent=100)
    changed = sum(before.get(key) != value for key, value in attributes().items())
    llm = engine(tiny())
    tokens = generate(llm, PROMPTS, greedy(100))
    found = {"tokens": tokens, "points": points(handle), "spans": spans(), "availability": availability(handle)}
    llm.reset_prefix_cache()
    found |= told(BOOKS[-1], 0)
    handle.flush()
    found |= {"store": stored(directory), "patched": changed}
    kvobs.uninstrument()
    found["left"] = [".".join(key) for key, value in attributes().items() if before.get(key) != value]
    found["left"] += [".".join(key) for key in before if key not in attributes()]
    mark = len(LOG)
    found["tokens_off"] = generate(llm, PROMPTS, greedy(100))
    found["published_off"] = len(LOG) - mark
    return found


def observe(**settings: Any) -> Any:
    """Kvobs, however dear it is to tell every call."""
    return kvobs.instrument(prometheus="off", overhead_percent=100, **settings)


def prefixes() -> dict[str, Any]:
    """Shared prefixes, samples of one prompt, a prefix that is asked again after its eviction; chunks of a prompt."""
    observe()
    mark = len(LOG)
    llm = engine(tiny(), max_num_batched_tokens=64, max_num_seqs=4, max_model_len=LONGEST)
    generate(llm, [prompt(100, seed, shared=70) for seed in range(3)], greedy(5))
    samples = generate(llm, [prompt(64, 7)], vllm.SamplingParams(
        n=2, temperature=0.9, seed=3, max_tokens=40, ignore_eos=True, detokenize=False))
    sums = [told(BOOKS[-1], mark)["sums"]]
    for length, seed in ((200, 10), (310, 11), (310, 12), (230, 10), (192, 10), (1, 10)):
        generate(llm, [prompt(length, seed)], greedy(3))
        sums.append(BOOKS[-1].sums())
    return told(BOOKS[-1], mark) | {"samples": samples, "sums_between": sums}


def aborts() -> dict[str, Any]:
    """By hand: aborts in the queue and while running, a reset of running requests, a pause, one that never fits."""
    observe()
    mark = len(LOG)
    llm = engine(tiny(), max_num_seqs=4, max_model_len=LONGEST)
    steps = Steps(llm)
    for number in range(6):
        steps.add(f"r{number}", prompt(70, number), greedy(20))
    steps.step(3)
    found = {"slots": states()}
    steps.engine.abort_request(["r0"])
    steps.engine.abort_request(["r5"])
    steps.step(3)
    steps.core.reset_prefix_cache(reset_running_requests=True)
    steps.finish()
    steps.core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    steps.add("paused", prompt(70, 20), greedy(3))
    steps.core.step_fn()
    found["paused"] = states()
    steps.core.scheduler.set_pause_state(PauseState.UNPAUSED)
    steps.finish()
    plan = steps.core.scheduler
    plan.max_model_len = plan.kv_cache_manager.max_model_len = 2 * LONGEST  # as if vLLM had not said so
    plan.add_request(Request("large", prompt(LONGEST + 1, 30)["prompt_token_ids"], greedy(3), None,
                             block_hasher=steps.core.request_block_hasher))
    plan.schedule()
    found["large"] = states()
    plan.finish_requests("large", RequestStatus.FINISHED_ABORTED)
    return told(BOOKS[-1], mark, steps.names) | found | {"outputs": steps.outputs}


def between() -> dict[str, Any]:
    """Kvobs begins while a request runs, ends, and begins again; the prefix cache is off in another engine."""
    llm = engine(tiny(), max_num_seqs=4)
    steps = Steps(llm)
    steps.add("before", prompt(70, 0), greedy(12))
    steps.step(4)
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        mark, start = len(LOG), BOOKS[-1].sums()
        looks = len(BOOKS[-1].looks)
        observe()
        steps.add(name, prompt(70, 0, shared=64), greedy(6))
        steps.finish()
        found[name] = told(BOOKS[-1], mark, dict(steps.names)) | {"start": start, "first_look": looks}
        kvobs.uninstrument()
    del steps, llm
    gc.collect()
    mark = len(LOG)
    observe()
    llm = engine(tiny(), enable_prefix_caching=False)
    generate(llm, [prompt(100, seed, shared=64) for seed in range(2)], greedy(3))
    return found | {"uncached": told(BOOKS[-1], mark)}


def failing() -> dict[str, Any]:
    """Hooks that raise."""
    from kvobs.sources.vllm._pool import PoolLedger

    llm = engine(tiny())
    expected = generate(llm, PROMPTS[:4], greedy(30))
    found: dict[str, Any] = {"expected": expected}
    for name in ("handed_out", "forgot", "touching", "freed"):
        llm.reset_prefix_cache()
        mark, original = len(LOG), getattr(PoolLedger, name)
        before = attributes()

        def broken(*_: Any) -> None:
            raise RuntimeError("broken for the test")

        setattr(PoolLedger, name, broken)
        try:
            handle = observe()
            tokens = generate(llm, PROMPTS[:4], greedy(30))
            generate(llm, PROMPTS[:1], greedy(1))  # a hit
            generate(llm, PROMPTS[4:], greedy(30))  # evictions
            found[name] = {"tokens": tokens, "availability": availability(handle),
                           "failed": [event["hook"] for event in events(mark, "HookFailed")]}
        finally:
            setattr(PoolLedger, name, original)
            kvobs.uninstrument()
        found[name]["left"] = [".".join(key) for key, value in attributes().items() if before.get(key) != value]
    return found


def priorities() -> dict[str, Any]:
    """The policy of priorities: victims are those of the lowest, not the last."""
    observe()
    mark = len(LOG)
    llm = engine(tiny(), scheduling_policy="priority")
    outputs = generate(llm, PROMPTS, greedy(40), priority=[3, 0, 5, 1, 7, 2, 6, 4])
    return told(BOOKS[-1], mark) | {"outputs": outputs}


def overlapped() -> dict[str, Any]:
    """Planned one step ahead: a request loses its blocks while its first token is under way."""
    observe()
    mark = len(LOG)
    steps = Steps(engine(tiny(), Account))
    for number in range(6):
        steps.add(f"r{number}", prompt(71, number), greedy(60))
    steps.plan_ahead({26: "late"})  # in step 27 the six need a fourth block each, and two are left
    return told(BOOKS[-1], mark, steps.names)


def sliding() -> dict[str, Any]:
    """A model of two groups of layers: one with a sliding window, one without."""
    observe()
    mark = len(LOG)
    model = tiny("sliding", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2,
                 sliding_window=64)
    llm = engine(model, num_gpu_blocks_override=32, max_model_len=256)
    outputs = generate(llm, [prompt(150, seed, shared=70) for seed in range(5)], greedy(50))
    groups = [[type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, len(group.layer_names)] for group in
              llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups]
    return told(BOOKS[-1], mark) | {"outputs": outputs, "groups": groups,
                                    "block_bytes": events(mark, "Blocks")[-1]["block_bytes"]}


def drafts() -> dict[str, Any]:
    """Speculative decoding with drafts from the prompt."""
    # Without numba, which its proposer only uses to be fast.
    sys.modules.setdefault("numba", plain_numba())
    observe()
    mark = len(LOG)
    llm = engine(tiny(), speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3,
                                             "prompt_lookup_min": 1})
    outputs = generate(llm, PROMPTS, greedy(60))
    return told(BOOKS[-1], mark) | {"outputs": outputs}


def plain_numba() -> Any:
    """Its names, that do nothing."""
    def same(*arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else same

    module = types.ModuleType("numba")
    module.__dict__.update(jit=same, njit=same, prange=range, get_num_threads=lambda: 1, set_num_threads=int)
    return module


def states() -> dict[str, Any]:
    """Who is in the engine, as kvobs said last."""
    return events(0, "RequestStates")[-1]


SCENES = {"pressure": pressure, "prefixes": prefixes, "aborts": aborts, "between": between, "failing": failing,
          "priorities": priorities, "overlapped": overlapped,
          "sliding": sliding, "drafts": drafts}


def main(target: str, names: list[str]) -> None:
    """Play the scenes, and write what was seen to ``target``."""
    watch_everything()
    found: dict[str, Any] = {"version": vllm.__version__, "seconds": {}}
    gc.freeze()  # each engine collects garbage again and again, and what was imported is most of what there is
    for name in names or SCENES:
        began = time.monotonic()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[name] = SCENES[name]()
            except Exception:
                found[name] = {"raised": traceback.format_exc()}
        kvobs.uninstrument()
        gc.collect()
        gc.freeze()
        found["seconds"][name] = round(time.monotonic() - began, 1)
    Path(target).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
