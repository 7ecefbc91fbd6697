"""Scenes of a breaker's orders on vLLM's real engine, in one process; writes what was seen as JSON.

Runs in the Python that has vLLM. The pool, the batch and the lengths are those of the reference run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

import kvobs
from kvobs.model import Order
from tests.vllm_account import BOOKS, LOG, _findable
from tests.vllm_scenes import PROMPTS, observe
from tests.vllm_stage import Steps, attributes, engine, events, generate, greedy, prompt, tiny, watch_everything

FAR_NS = 60 * 10**9
LIMIT = "max_num_active_reqs"


class Hands:
    """The actuator of the engine, and what it answered."""

    def __init__(self, handle: Any) -> None:
        self.actuator, = (one for source in handle.runtime.sources for one in getattr(source, "actuators", ())
                          if one.name.startswith("vllm"))
        self.kinds = {one.kind: one for one in self.actuator.capabilities()}
        self.mark, self.generation = len(LOG), 0

    def order(self, kind: str, *, undo: bool = False, within_ns: int = FAR_NS) -> None:
        """Order something for the next safe point."""
        self.generation += 1
        until = time.monotonic_ns() + within_ns
        self.actuator.submit(Order(self.kinds[kind].level, kind, self.generation, until, undo))

    def answers(self) -> list[dict[str, Any]]:
        """What was answered since the last call."""
        found, self.mark = events(self.mark, "ActionTaken"), len(LOG)
        return found


def await_(seen: Any) -> None:
    """Return once something is there; raises TimeoutError after 30 s."""
    pause, until = threading.Event(), time.monotonic() + 30
    while not seen():
        if time.monotonic() > until:
            raise TimeoutError
        pause.wait(0.01)


def state(scheduler: Any) -> dict[str, Any]:
    """Every attribute of the scheduler: plain values as they are, others by identity, containers with their length."""
    return {name: repr(value) if isinstance(value, int | str | float | None) else
            (id(value), len(value) if hasattr(value, "__len__") else None) for name, value in vars(scheduler).items()}


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of attributes that differ."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def limits(scheduler: Any) -> dict[str, int]:
    """The most tokens of each request that is there."""
    return {name: request.max_tokens for name, request in scheduler.requests.items()}


def admission() -> dict[str, Any]:
    """The reference run as it is, then with KV-aware admission ordered at its start, undone, and unobserved."""
    handle = observe()
    llm = engine(tiny())
    found: dict[str, Any] = {"tokens": generate(llm, PROMPTS, greedy(100))}
    found["preempted"] = BOOKS[-1].sums()["preemptions"]
    plan, hands = Steps(llm).core.scheduler, Hands(handle)
    llm.reset_prefix_cache()
    before = state(plan)
    hands.order("kv_aware_admission")
    plan.has_requests()
    found |= {"at_rest": changed(before, state(plan)), "answer": hands.answers()}
    steps = Steps(llm)
    for number, one in enumerate(PROMPTS):
        steps.add(f"r{number}", one, greedy(100))
    found["ran"], found["fits"] = [], []
    while steps.engine.has_unfinished_requests():
        steps.step()
        found["ran"].append(len(plan.running))
        found["fits"].append(getattr(plan, LIMIT, None))
    found |= {"tokens_admitted": [[steps.outputs[f"r{number}"]] for number in range(len(PROMPTS))],
              "preempted_admitted": BOOKS[-1].sums()["preemptions"] - found["preempted"],
              "statuses": sorted(limits(plan))}
    before = state(plan)
    hands.order("kv_aware_admission")
    plan.has_requests()
    found |= {"again": changed(before, state(plan)), "answer_again": hands.answers()}
    hands.order("kv_aware_admission", undo=True)
    plan.has_requests()
    found |= {"undone": hands.answers(), "limit_after": getattr(plan, LIMIT, None), "slots": plan.max_num_running_reqs}
    llm.reset_prefix_cache()
    hands.order("kv_aware_admission")
    plan.has_requests()
    steps.add("late", PROMPTS[0], greedy(100))
    for number in (1, 2, 3):
        steps.add(f"late{number}", PROMPTS[number], greedy(100))
    steps.step(2)
    found["limit_held"] = getattr(plan, LIMIT, None)
    kvobs.uninstrument()
    found["limit_off"] = getattr(plan, LIMIT, None)
    steps.finish()
    llm.reset_prefix_cache()
    return found | {"tokens_off": generate(llm, PROMPTS, greedy(100))}


def emptied() -> dict[str, Any]:
    """The prefix cache reset: while requests run, at rest, and again."""
    handle = observe()
    llm = engine(tiny())
    generate(llm, PROMPTS[:4], greedy(40))
    steps, hands = Steps(llm), Hands(handle)
    plan, pool = steps.core.scheduler, steps.core.scheduler.kv_cache_manager.block_pool
    steps.add("running", prompt(71, 30), greedy(5))
    steps.step(2)
    used = len(pool.blocks) - 1 - pool.free_block_queue.num_free_blocks
    hands.order("prefix_cache_reset")
    steps.step()
    found = {"busy": hands.answers(), "used": used, "kept": len(_findable(pool))}
    steps.finish()
    cached = len(_findable(pool))
    found |= {"cached": cached, "planned": hands.actuator.plan("prefix_cache_reset").bytes}
    hands.order("prefix_cache_reset")
    plan.has_requests()
    found |= {"reset": hands.answers(), "left": len(_findable(pool)), "told": events(0, "Blocks")[-1]["cached"]}
    hands.order("prefix_cache_reset")
    plan.has_requests()
    hands.order("prefix_cache_reset", undo=True)
    plan.has_requests()
    found["again"] = hands.answers()
    steps.add("hit", prompt(71, 30), greedy(5))
    steps.finish()
    uncached = engine(tiny(), enable_prefix_caching=False)
    point = [one for source in handle.runtime.sources if source.name == "vllm" for one in source.actuators][-1]
    found |= {"uncached": point.plan("prefix_cache_reset").reason, "names": [hands.actuator.name, point.name]}
    del uncached
    return found | {"outputs": steps.outputs}


def clamped() -> dict[str, Any]:
    """Answers of sheddable sessions clamped while they run, while they wait, and when they come; then given back."""
    handle = observe()
    llm = engine(tiny(), num_gpu_blocks_override=64)
    whole = [generate(llm, [prompt(40, seed)], greedy(60))[0][0] for seed in range(6)]
    steps, hands = Steps(llm), Hands(handle)
    plan = steps.core.scheduler
    hands.actuator.clamp.limit = 20

    def add(name: str, seed: int, priority: str, **settings: Any) -> None:
        with kvobs.session(f"s-{name}", priority=priority):
            steps.add(name, prompt(40, seed), greedy(60, **settings))

    add("early", 0, "sheddable")
    add("normal", 1, "normal")
    steps.step(31)
    generated = plan.requests[steps.names["early"]].num_output_tokens
    add("waits", 2, "sheddable")
    add("promised", 3, "sheddable", min_tokens=45)
    hands.order("clamp_tokens")
    steps.step()
    hands.order("clamp_tokens")
    steps.step()
    add("new", 4, "sheddable")
    add("critical", 5, "critical")
    held = {name: limits(plan).get(known) for name, known in steps.names.items()}
    steps.finish()
    found = {"whole": whole, "outputs": dict(steps.outputs), "generated": generated, "held": held,
             "answers": hands.answers()}
    add("back", 0, "sheddable")
    steps.step(5)
    found["back_held"] = limits(plan)[steps.names["back"]]
    hands.order("clamp_tokens", undo=True)
    steps.finish()
    add("after", 1, "sheddable")
    hands.order("clamp_tokens")
    steps.step(3)
    found["after_held"] = limits(plan)[steps.names["after"]]
    kvobs.uninstrument()
    found["off_held"] = limits(plan)[steps.names["after"]]
    steps.finish()
    return found | {"given_back": [steps.outputs["back"], steps.outputs["after"]], "undone": hands.answers()}


def paused() -> dict[str, Any]:
    """Admission paused: until it is undone, until nobody runs any more, and overruled by somebody else's pause."""
    handle = observe()
    llm = engine(tiny(), max_num_seqs=3, num_gpu_blocks_override=64)
    whole = [generate(llm, [prompt(40, seed)], greedy(12))[0][0] for seed in range(6)]
    steps, hands = Steps(llm), Hands(handle)
    plan = steps.core.scheduler
    hands.order("pause")
    plan.has_requests()
    found: dict[str, Any] = {"idle": hands.answers(), "whole": whole}
    for name in ("undone", "lifted", "overruled"):
        for number in range(6):
            steps.add(f"{name}{number}", prompt(40, number), greedy(12 - number))
        steps.step(3)
        hands.order("pause")
        ran = []
        for step in range(14):
            steps.step()
            known = {request: own for own, request in steps.names.items()}
            ran.append((sorted(known[one.request_id] for one in plan.running), plan.pause_state.name))
            if name == "undone" and step == 5:
                hands.order("pause", undo=True)
            if name == "overruled" and step == 4:
                plan.set_pause_state(PauseState.PAUSED_NEW)
        found[name] = {"ran": ran, "answers": hands.answers()}
        if name == "overruled":
            hands.order("pause", undo=True)
            plan.has_requests()
            found[name] |= {"theirs": plan.pause_state.name}
            hands.order("pause")
            plan.has_requests()
            found[name] |= {"refused": hands.answers()}
            plan.set_pause_state(PauseState.UNPAUSED)
        steps.finish()
    return found | {"outputs": steps.outputs}


def idle() -> dict[str, Any]:
    """The real loop of an engine core's process, which waits for messages, on a scheduler that has nothing to do."""
    before = attributes()
    handle = observe()
    llm = engine(tiny())
    generate(llm, PROMPTS[:2], greedy(40))
    Steps(llm).core.step_fn()  # tells the worker who has ended; until then there is work to do
    hands, plan = Hands(handle), Steps(llm).core.scheduler
    core = object.__new__(EngineCoreProc)
    core.__dict__.update(
        scheduler=plan, input_queue=queue.Queue(), aborts_queue=queue.Queue(), process_input_queue_block=True,
        engines_running=False, batch_queue=None, _idle_state_callbacks=[])
    going = threading.Event()
    going.set()
    core.is_running = going.is_set  # type: ignore[method-assign]
    loop = threading.Thread(target=core._process_input_queue, daemon=True)
    loop.start()
    await_(lambda: hands.actuator._core() is core)
    cached = len(_findable(plan.kv_cache_manager.block_pool))
    hands.order("prefix_cache_reset")
    await_(lambda: events(hands.mark, "ActionTaken"))
    found = {"cached": cached, "answers": hands.answers(), "alive": loop.is_alive(),
             "kept": len(_findable(plan.kv_cache_manager.block_pool))}
    going.clear()
    core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
    loop.join(30)
    hands.order("prefix_cache_reset", within_ns=0)
    handle.flush()  # nobody steps: the drain thread answers what is overdue
    found["overdue"] = hands.answers()
    hands.order("kv_aware_admission")
    kvobs.uninstrument()
    found |= {"closed": hands.answers(), "ended": not loop.is_alive(),
              "loop": hasattr(EngineCoreProc._process_input_queue, "__wrapped__")}
    after = attributes()
    left = [".".join(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    return found | {"left": left}


SCENES = {"admission": admission, "emptied": emptied, "clamped": clamped, "paused": paused, "idle": idle}


def main(target: str, names: list[str]) -> None:
    """Play the scenes, and write what was seen to ``target``."""
    watch_everything()
    found: dict[str, Any] = {"version": vllm.__version__}
    gc.freeze()
    for name in names or SCENES:
        with contextlib.redirect_stdout(sys.stderr):
            try:
                found[name] = SCENES[name]()
            except Exception:
                found[name] = {"raised": traceback.format_exc()}
        kvobs.uninstrument()
        gc.collect()
        gc.freeze()
    Path(target).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
