"""A real OTLP agent receives what a breaker decided and did in a real process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_breaker_cli import POLICY
from tests.peers import rotel
from tests.support import ROOT, child_environment, wait_until

pytest.importorskip("opentelemetry.sdk", reason="The OpenTelemetry SDK is not installed (extra otel).")
pytestmark = pytest.mark.peer

# Three turns, of which the second runs when its process's breaker decides.
CHILD = """
import sys, time
import kvobs
from kvobs import runtime, spans
from tests import events
from tests.support import wait_until

def turn(name):
    opened = spans.open_turn(running.otel_tracer(), name, time.time_ns(), {}, attach=False)
    return lambda: opened.close(events.turn(origin=events.origin(name)), [], {}, None, [])

with kvobs.instrument() as observed:
    running = runtime.current()
    turn("before")()
    end = turn("during")
    observed.report("app.load", 1.5)
    wait_until(lambda: running.protection.breaker.decisions)
    end()
    turn("after")()
    sys.stdin.read()
"""


def test_rotel_receives_decisions_actions_and_the_turn_s_event(tmp_path: Path) -> None:
    """The transition and, linked to it, what engines did come as spans; of three turns the one that ran has the
    decision as an event.
    """
    (tmp_path / "policy.toml").write_text(POLICY)
    with rotel(tmp_path) as agent:
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, cwd=ROOT, env=child_environment(
            KVOBS_STORE="off", KVOBS_PROMETHEUS="off", KVOBS_BREAKER="act", OTEL_BSP_SCHEDULE_DELAY="100",
            KVOBS_BREAKER_POLICY=str(tmp_path / "policy.toml"), OTEL_EXPORTER_OTLP_ENDPOINT=agent.http,
            OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf"))
        try:
            wait_until(lambda: {"kvobs.breaker.transition", "kvobs.breaker.action", "text_completion after"}
                       <= set(agent.spans()), 60, "rotel has the spans")
        finally:
            child.communicate(timeout=60)
        assert child.returncode == 0
        parts = [(name[1].strip(), part) for part in re.split(r"^Span #\d+$", agent.text(), flags=re.MULTILINE)
                 if (name := re.search(r"^ +Name +: (.*?)$", part, re.MULTILINE))]
        decision, = [part for name, part in parts if name == "kvobs.breaker.transition"]
        assert "Level 1 (reorganise) is open" in decision
        done = [part for name, part in parts if name == "kvobs.breaker.action" and "undo: Bool(false)" in part]
        assert done
        assert all(f"-> Trace ID: {agent.spans()['kvobs.breaker.transition']}\n" in part for part in done)
        assert [name for name, part in parts if "kvobs.breaker.decision" in part] == ["text_completion during"]
