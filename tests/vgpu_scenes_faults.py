"""Scenes: actions on the virtual GPU that fail half way, and breakers that only watch, beside the same without."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from kvobs.config import Config
from kvobs.runtime import Runtime
from kvobs.sources._safe_point import Result
from kvobs.store import StoreReader, actions, decisions
from tests.contract import tiny
from tests.contract.actuators import Caches, caches
from tests.contract.ordered import generated

transformers.logging.set_verbosity_error()
FIRST = "vgpu:0"
MOST = 16  # operators of one action that are made to fail, one by one
POLICY = "\n".join(['name = "load"', 'escalate = "1ms"', "transitions = 10000", *(f"""
[[level]]
any = [{{ signal = "app.load", above = {level} }}]
open = "1ms"
closed = "1ms"
longest_open = "1ms"
half_open = "1ms"
""" for level in (1, 2, 3))])


class FailsAt(TorchDispatchMode):  # type: ignore[misc]
    """The so manieth operator raises."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left, self.failed = number, False

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if self.left == 0 and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("no room")
        self.left -= 1
        return function(*arguments, **(keywords or {}))


def _failing(act: Callable[[int], Result], at: int, seen: list[bool]) -> Callable[[int], Result]:
    def run(deadline_ns: int) -> Result:
        mode = FailsAt(at)
        try:
            with mode:
                return act(deadline_ns)
        finally:
            seen.append(mode.failed)

    return run


def _values(cache: Any) -> list[bytes]:
    return [tensor.cpu().contiguous().numpy().tobytes() for layer in cache.layers
            for tensor in (layer.keys, layer.values)]


def _devices(cache: Any) -> set[str]:
    return {str(tensor.device) for layer in cache.layers for tensor in (layer.keys, layer.values)}


def _chat(engine: Caches, cache: Any) -> list[int]:
    ids, said = tiny.prompt(3).to(engine.device), []
    for _ in range(6):
        with torch.no_grad():
            ids = engine.model(input_ids=ids, use_cache=True, **{tiny.CACHE: cache})[0][:, -1:].argmax(-1)
        said.append(int(ids))
    return said


def half_way() -> dict[str, Any]:
    """Each action and each undoing fails at its first, second, … operator: what is left, and what sessions answer."""
    found: dict[str, Any] = {}
    with caches(FIRST, idle_ns=1) as engine:
        for kind in ("chunked_growth", "compact", "offload", "undo chunked_growth", "undo offload"):
            told = {"failed": 0, "answers": 0, "values": True, "devices": True, "in effect": True, "tokens": True}
            at = 0
            while at < MOST and _failed_at(engine, kind, at, told):
                at += 1
                gc.collect()
            found[kind] = told
    return found


def _failed_at(engine: Caches, kind: str, at: int, told: dict[str, Any]) -> bool:
    """Let one operator of an action fail; False where the action has no so many."""
    undo, kind = kind.startswith("undo "), kind.removeprefix("undo ")
    session = engine.session(30, 3, 2)
    session.crop(-15)
    twin = copy.deepcopy(session)
    if undo:
        assert engine.order(kind).done
    before, where, seen = _values(session), _devices(session), list[bool]()
    action = engine.point._actions[kind]
    engine.point._actions[kind] = (replace(action, undo=_failing(action.undo, at, seen)) if undo
                                   else replace(action, carry_out=_failing(action.carry_out, at, seen)))
    taken = engine.order(kind, undo=undo)
    engine.point._actions[kind] = action
    told["values"] &= _values(session) == before
    if seen == [True]:
        told["failed"] += 1
        # What could not be brought back is tried again at once, after the allocator has given back what it can.
        told["answers"] += taken.done if taken.done and undo else "no room" in taken.reason
        told["devices"] &= _devices(session) == ({FIRST} if taken.done else where)
        told["in effect"] &= engine.point.in_effect() == ((kind,) if undo and not taken.done else ())
    engine.watch.bus.active = False
    expected = _chat(engine, twin)
    engine.watch.bus.active = True
    told["tokens"] &= _chat(engine, session) == expected
    told["in effect"] &= engine.order(kind, undo=undo).done
    if action.undo is not None:
        told["in effect"] &= engine.point.in_effect() == (() if undo else (kind,))
        engine.order(kind, undo=True)
    return seen == [True]


def watched() -> dict[str, Any]:
    """A generate call under a load that comes and goes, without a breaker, with one that observes and one that acts."""
    model = tiny.llama().to(FIRST)
    expected = generated(model, FIRST, 40, {}, None, None)
    found = {}
    for mode in ("observe", "act"):
        with tempfile.TemporaryDirectory() as name:
            store, policy = Path(name) / "store", Path(name) / "policy.toml"
            policy.write_text(POLICY)
            runtime = Runtime(Config(store=store, prometheus=None, otlp="off", breaker=mode,
                                     breaker_policy=str(policy)))
            runtime.start()
            levels = set[int]()

            def each(ids: Any, scores: Any, runtime: Runtime = runtime, levels: set[int] = levels) -> Any:
                protection = runtime.protection
                assert protection is not None
                protection.report("app.load", 9.0 * (ids.shape[1] // 8 % 2), time.monotonic_ns())
                runtime.tick()
                assert protection.breaker is not None
                levels.update(protection.breaker.levels().values())
                return scores

            tokens = generated(model, FIRST, 40, {}, each, None)
            runtime.stop()
            reader = StoreReader(store)
            found[mode] = {
                "tokens": torch.equal(tokens[0], expected[0]), "logits": torch.equal(tokens[1], expected[1]),
                "levels": sorted(levels), "decided": len(decisions(reader)),
                "done": sorted({one.record.kind for one in actions(reader) if one.record.done}),
                "orders": len(actions(reader))}
    return found
