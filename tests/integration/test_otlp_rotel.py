"""A real OTLP agent receives what kvobs pushes, over both transports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.peers import rotel, worker
from tests.support import run_python, wait_until

pytest.importorskip("opentelemetry.sdk", reason="The OpenTelemetry SDK is not installed (extra otel).")
pytestmark = pytest.mark.peer

FORKED = """
import os
from opentelemetry import trace
from kvobs.config import Config
from kvobs.exporters import OtelExporter
from kvobs.metrics import Metrics
from tests.peers import spoken_turn

def work(otel, state, name):
    with otel.tracer().start_as_current_span(name) as span:
        ids = span.get_span_context()
    state.fold([spoken_turn(trace.format_trace_id(ids.trace_id), trace.format_span_id(ids.span_id), name)])
    otel.tick(state.take_observations())

state = Metrics()
otel = OtelExporter(Config(), state, "parent-process")
work(otel, state, "before fork")
otel.flush()
work(otel, state, "queued at fork")
child = os.fork()
if not child:
    otel.abandon()
    state = Metrics()
    otel = OtelExporter(Config(), state, "child-process")
    work(otel, state, "in child")
    otel.stop()
    os._exit(0)
status = os.waitpid(child, 0)[1]
work(otel, state, "after fork")
otel.stop()
assert status == 0
"""


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_rotel_receives_spans_and_metrics(tmp_path: Path, protocol: str) -> None:
    """The agent gets the span with its trace id and the metrics with values, exemplar and resource, nothing is lost."""
    with rotel(tmp_path) as agent:
        with worker(OTEL_EXPORTER_OTLP_ENDPOINT=agent.endpoint(protocol), OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                    OTEL_SERVICE_NAME="chat", OTEL_RESOURCE_ATTRIBUTES="team=blue") as process:
            wait_until(lambda: "text_completion m" in agent.spans(), what="rotel has the span")
            wait_until(lambda: "kvobs.turns" in agent.metrics(), what="rotel has the metrics")
            assert process.end() == {"lost": 0}
            assert agent.spans()["text_completion m"] == process.said["trace_id"]
        seen, text = agent.metrics(), agent.text()
        assert "-> Unit: {turn}" in seen["kvobs.turns"]
        assert "Value: 1\n" in seen["kvobs.turns"]
        assert "IsMonotonic: true" in seen["kvobs.turns"]
        duration = seen["gen_ai.server.request.duration"]
        assert "DataType: Histogram" in duration
        assert "Sum: 1\n" in duration
        assert f"Trace ID: {process.said['trace_id']}" in text.split("gen_ai.server.request.duration")[1]
        for attribute in ("service.name: Str(chat)", "team: Str(blue)", "service.instance.id: Str(process-1)"):
            assert attribute in text


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_forked_child_pushes_its_own_and_only_its_own(tmp_path: Path, protocol: str) -> None:
    """Of spans before, queued at, in the child of and after a fork, rotel gets each exactly once, under the right
    process."""
    with rotel(tmp_path) as agent:
        done = run_python(FORKED, OTEL_EXPORTER_OTLP_ENDPOINT=agent.endpoint(protocol),
                          OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        names = ("before fork", "queued at fork", "in child", "after fork")
        wait_until(lambda: all(name in agent.spans() for name in names), what="rotel has all spans")
        text = agent.text()
        for name in names:
            assert text.count(f"    Name           : {name}\n") == 1
        of_child = [part for part in re.split(r"Resource(?:Spans|Metrics) #", text) if "child-process" in part]
        assert any("in child" in part for part in of_child)
        assert not any(f": {name}\n" in part for part in of_child for name in names if name != "in child")
