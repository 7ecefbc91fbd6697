"""What the breaker costs: the gate per request, the machine per step, boards and admission, at a thousand sessions."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvobs.asgi import BreakerMiddleware
from kvobs.breaker import Reading, State, begin, load_policy, step
from kvobs.breaker._admission import Admission
from kvobs.breaker._board import BoardReader, BoardWriter
from kvobs.breaker._gate import ACT, Decision, Gate
from kvobs.breaker._limits import ByPriority, by_priority
from tests.bench._rows import Plan, Progress, Row, compared, repeated

GROUP = "the breaker"
SESSIONS = 1_000
GATE_US, STEP_US = 1.0, 50.0
SECOND = 10**9


def _each(call: Callable[[], object], number: int) -> float:
    """Nanoseconds of CPU per call."""
    began = time.thread_time_ns()
    for _ in range(number):
        call()
    return (time.thread_time_ns() - began) / number


def _decision(level: int = 3) -> Decision:
    return Decision(generation=1, level=level, mode=ACT, limits=by_priority(ByPriority(), level), retry_after_s=2.0,
                    expires_ns=2**62, reason="Level 3 (degrade) is open: its condition holds.")


def _gate() -> Callable[[], object]:
    gate = Gate()
    gate.decision = _decision()
    return lambda: gate.limits("normal")


def _stepping(*, changing: bool) -> Callable[[], object]:
    """Steps of the default policy with all its signals, 0.25 s apart; quiet, or with conditions that come and go."""
    policy, now = load_policy("default"), 0
    state: State = begin(policy, 0)
    bad = good = _readings(0, "SERVED", 0.5, 0.0, 0.5, 0.0)

    def one() -> object:
        nonlocal state, now, bad, good
        now += SECOND // 4
        if now % (5 * SECOND) == 0:  # fresh ones are as dear in a process, but not a part of the step
            bad = _readings(now, "CAPACITY", 0.01, 1.0, 20.0, 2.0)
            good = _readings(now, "SERVED", 0.5, 0.0, 0.5, 0.0)
        signals = bad if changing and now // (20 * SECOND) % 2 else good
        state, told = step(policy, state, signals, now)
        return told

    return one


def _readings(now_ns: int, verdict: str, headroom: float, errors: float, burn: float,
              preemptions: float) -> dict[str, Reading]:
    values: dict[str, float | str] = {"verdict": verdict, "pool_verdict": verdict, "headroom": headroom,
                                      "out_of_memory": errors, "burn_rate": burn, "preemption_rate": preemptions}
    return {name: Reading(value, now_ns) for name, value in values.items()}


def _turn() -> Callable[[], object]:
    """A request comes, and one of a thousand sessions that wait is let in and ends."""
    admission, number = Admission(0, queued=2 * SESSIONS), 0
    for session in range(SESSIONS):
        admission.arrive(f"session-{session}", "normal", 2**62, 0)

    def one() -> object:
        nonlocal number
        number += 1
        admission.arrive(f"session-{number % SESSIONS}", "normal", 2**62, 1)
        (ticket,) = admission.settle(number, 1)
        return admission.leave(ticket, number)

    return one


def _served(app: Any, number: int) -> float:
    """Nanoseconds of CPU per request through an application, from call to return."""
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "client": ("10.0.0.1", 1),
             "headers": [(b"content-type", b"application/json"), (b"kvobs-session", b"s")]}
    body = {"type": "http.request", "body": b'{"max_tokens": 500}', "more_body": False}

    async def receive() -> Any:
        return body

    async def send(message: Any) -> None:
        pass

    async def run() -> float:
        began = time.thread_time_ns()
        for _ in range(number):
            await app(scope, receive, send)
        return (time.thread_time_ns() - began) / number

    return asyncio.run(run())


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Board:
    def __init__(self, found: Decision | None) -> None:
        self._found = found

    def decision(self) -> Decision | None:
        return self._found


def _requests(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds = plan.rounds(60, 10)
    done = progress(rounds)
    arms = {"a request through the middleware, no level open: added": BreakerMiddleware(_app, board=_Board(None)),
            "a request that is let in and clamped: added": BreakerMiddleware(_app, board=_Board(_decision()))}
    added: dict[str, list[float]] = {name: [] for name in arms}
    same: list[float] = []
    for _ in range(rounds):
        bare = _served(_app, 500)
        same.append((_served(_app, 500) - bare) / 1e3)
        for name, made in arms.items():
            added[name].append((_served(made, 500) - bare) / 1e3)
        done()
    for name, values in added.items():
        yield compared(GROUP, name, values, same, "µs")


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds = plan.rounds(200, 30)
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        writer, reader = BoardWriter(Path(directory), "engine"), BoardReader(Path(directory))
        writer.publish(_decision())
        calls: tuple[tuple[str, Callable[[], object], int, float | None], ...] = (
            ("the gate, per request", _gate(), 2_000, GATE_US),
            ("a step, nothing happens", _stepping(changing=False), 200, STEP_US),
            ("a step, levels come and go", _stepping(changing=True), 200, STEP_US),
            (f"admission, {SESSIONS:,} sessions wait: one comes, one is let in and ends", _turn(), 200, None),
            ("the board: publish (4 a second)", lambda: writer.publish(_decision()), 50, None),
            ("the board: read (20 a second at most)", reader.decision, 50, None))
        done = progress(rounds)
        took: dict[str, list[float]] = {name: [] for name, *_ in calls}
        for _ in range(rounds):
            for name, call, number, _ in calls:
                took[name].append(_each(call, number))
            done()
        writer.close()
        reader.close()
    for name, _, _, budget in calls:
        yield repeated(GROUP, name, took[name], "µs", scale=1e-3, budget=budget)
    yield from _requests(plan, progress)
