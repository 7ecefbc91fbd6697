"""A store of a serving engine for tests: a pool of 100 blocks and its requests, in figures that a reader can add up.

The process begins at ``BEGAN`` (Unix time); times in what is written are seconds after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvobs import model
from kvobs.catalog import BY_NAME
from kvobs.store import StoreWriter

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
ORIGIN = model.Origin("vllm", "org/tiny", "BlockPool", "cpu", "bfloat16")
POOL = 3


def row(request: str, session: str = "", state: str = "running", blocks: int = 0, **fields: Any) -> model.RequestRow:
    values: dict[str, Any] = {
        "request": request, "session": session, "priority": "normal", "state": state, "reason": "",
        "phase": {"running": "decode", "waiting": "queued"}.get(state, state), "arrived_ns": 80 * SECOND,
        "since_ns": 90 * SECOND, "prompt_tokens": 64, "new_tokens": 3, "computed_tokens": 66, "cached_tokens": 32,
        "blocks": blocks, "preemptions": 0}
    return model.RequestRow(**values | fields)


def counted(rows: Sequence[model.RequestRow]) -> tuple[tuple[str, str, int], ...]:
    keys = sorted({(one.state, one.reason) for one in rows})
    return tuple((*key, sum((one.state, one.reason) == key for one in rows)) for key in keys)


def states(rows: Sequence[model.RequestRow] = (), at: float = 100, **fields: Any) -> model.RequestStates:
    values: dict[str, Any] = {"t_ns": int(at * SECOND), "origin": ORIGIN, "cache_id": POOL, "block_bytes": 4_096,
                              "slots": 8, "counts": counted(rows), "rows": tuple(rows), "more": 0}
    return model.RequestStates(**values | fields)


def pool(at: float = 100, used: int = 60, cached: int = 25, free: int = 14, **fields: Any) -> model.Blocks:
    values: dict[str, Any] = {"t_ns": int(at * SECOND), "origin": ORIGIN, "cache_id": POOL, "block_bytes": 4_096,
                              "used": used, "cached": cached, "free": free, "allocations": 0, "failures": 0,
                              "preemptions": 0}
    return model.Blocks(**values | fields)


def work(at: float = 100, **fields: Any) -> model.PoolWork:
    return model.PoolWork(**{"t_ns": int(at * SECOND), "origin": ORIGIN, "cache_id": POOL, "pinned": 1} | fields)


def phase(request: str, name: str, begin: float, end: float, **fields: Any) -> model.RequestPhase:
    values: dict[str, Any] = {"t_ns": int(end * SECOND), "start_ns": int(begin * SECOND), "origin": ORIGIN,
                              "cache_id": POOL, "request": request, "session": "", "phase": name, "outcome": "",
                              "blocks": 2}
    return model.RequestPhase(**values | fields)


def preemption(request: str, wanted_by: str, at: float, **fields: Any) -> model.Preemption:
    values: dict[str, Any] = {"t_ns": int(at * SECOND), "origin": ORIGIN, "cache_id": POOL, "request": request,
                              "session": "", "cause": "blocks", "wanted_by": wanted_by, "tokens_lost": 96, "blocks": 3,
                              "holders": ((wanted_by, 5), (request, 3))}
    return model.Preemption(**values | fields)


def write(directory: Path, events: Sequence[model.Event], process: str = "engine", *, until: float = 100,
          role: str = "", first_point: float = 1, close: bool = True) -> StoreWriter:
    """A store with ``events``, of a process whose points go from ``first_point`` to ``until``."""
    now = [0]
    writer = StoreWriter(directory, 64 << 20, process, clock=lambda: now[0], wall=lambda: BEGAN)
    writer.write(events)
    for at in (first_point, until):
        now[0] = int(at * SECOND)
        points: dict[tuple[str, ...], Any] = {("vllm", "engine_core", role): 1.0} if role else {}
        writer.write_points([(BY_NAME["kvobs.kv.usage"], {("m", "cpu", "x", "held"): 1.0}),
                             (BY_NAME["kvobs.process.role"], points)])
        writer.commit()
    if close:
        writer.close()
    return writer
