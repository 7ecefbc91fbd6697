"""A server and the breaker in one process: probes that end well close level 3, one that fails opens it again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvobs import runtime
from kvobs.asgi import BreakerMiddleware
from kvobs.config import Config
from tests.asgi import App, Call, scope
from tests.support import wait_until

POLICY = """
name = "load"
escalate = "0s"
""" + "".join(f"""
[[level]]
any = [{{ signal = "app.load", above = {limit}, max_age = "600s" }}]
open = "100ms"
half_open = "600s"
probes = 1
probes_needed = 2
probe_every = "100ms"
""" for limit in (1, 2, 3))


class Failing(App):
    """Answers as ``App`` does, or 500."""

    status = 200

    async def __call__(self, given: object, receive: object, send: object) -> None:
        async def sent(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "status": self.status}
            await send(message)  # type: ignore[operator]

        await super().__call__(given, receive, sent)


def test_outcomes_reach_the_breaker_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level 3, relieved, is on probation for 600 s. One sheddable request at a time passes: the first fails and the
    level is open again; in the next probation two that end well close it, and then everybody passes.
    """
    (tmp_path / "policy.toml").write_text(POLICY)
    monkeypatch.setenv("KVOBS_STORE", str(tmp_path / "store"))
    running = runtime.start(Config(store=tmp_path / "store", prometheus=None, otlp="off", breaker="act",
                                   breaker_policy=str(tmp_path / "policy.toml")))
    app = Failing()
    made = BreakerMiddleware(app)

    def load(value: float) -> None:
        assert running.protection is not None
        running.protection.report("app.load", value, running._clock())

    def phase() -> str:
        assert running.protection is not None
        assert running.protection.breaker is not None
        states = running.protection.breaker.states()
        return states["process"].levels[2].phase.value if states else ""

    def ask() -> int | None:
        return asyncio.run(Call(made, scope(kvobs_priority="sheddable")).run()).status

    def passes() -> int:
        """How many were refused before one passed as a probe (or because nobody is refused any more)."""
        refused = 0
        while ask() == 503:
            refused += 1
        return refused

    try:
        load(9.0)
        wait_until(lambda: phase() == "open", what="level 3 is open")
        wait_until(lambda: ask() == 503, what="the gate has seen it")
        assert app.bodies == []
        app.status = 500
        load(0.0)
        wait_until(lambda: ask() == 500, what="a probe passes")
        load(9.0)  # else the next probation could begin before it is seen
        wait_until(lambda: phase() == "open", what="level 3 is open again")
        wait_until(lambda: ask() == 503, what="the gate has seen it")
        app.status = 200
        load(0.0)
        passes()
        passes()
        wait_until(lambda: phase() == "closed", what="level 3 is closed")
        wait_until(lambda: [ask() for _ in range(3)] == [200] * 3, what="everybody passes")
        assert {json.loads(body)["max_tokens"] for body in app.bodies} == {500}
    finally:
        runtime.stop()
