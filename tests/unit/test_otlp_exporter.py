"""Which providers are used, what happens without an SDK, and against endpoints that are down, silent or refusing."""

from __future__ import annotations

import pytest

from tests.peers import black_hole
from tests.support import free_port, run_python

pytest.importorskip("opentelemetry.sdk", reason="The OpenTelemetry SDK is not installed (extra otel).")

SETUP = """
import logging, sys
from opentelemetry import metrics as metrics_api, trace
from kvobs.config import Config
from kvobs.exporters import OtelExporter
from kvobs.metrics import Metrics
from tests.peers import spoken_turn
state = Metrics()
def dropped():
    return sum({row.name: points for row, points in state.collect()}.get("kvobs.self.events.dropped", {}).values())
def facts():
    return {a[0]: (v, a[1]) for a, v in dict((r.name, p) for r, p in state.collect())["kvobs.availability"].items()}
def turn(otel):
    span = otel.tracer().start_span("turn")
    ids = span.get_span_context()
    span.end()
    state.fold([spoken_turn(trace.format_trace_id(ids.trace_id), trace.format_span_id(ids.span_id))])
    state.refresh(0)
    otel.tick(state.take_observations())
    return ids
"""
GLOBALS = SETUP + """
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
tracers, meters = TracerProvider(), MeterProvider([reader])
tracers.add_span_processor(SimpleSpanProcessor(spans))
def use_globals():
    trace.set_tracer_provider(tracers)
    metrics_api.set_meter_provider(meters)
def points():
    data = reader.get_metrics_data()
    return {m.name: list(m.data.data_points) for r in data.resource_metrics for s in r.scope_metrics
            for m in s.metrics} if data else {}
"""
BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("opentelemetry.sdk") or name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def _run(code: str, **settings: str) -> str:
    done = run_python(code, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_global_providers_are_used_and_not_replaced() -> None:
    """Spans and metrics go into the application's providers, exemplars included, and those stay the global ones."""
    assert _run(GLOBALS + """
use_globals()
otel = OtelExporter(Config(), state, "p")
ids = turn(otel)
found = points()
assert [span.context.trace_id for span in spans.get_finished_spans()] == [ids.trace_id]
[point] = found["gen_ai.server.request.duration"]
assert (point.count, point.sum) == (1, 1.0)
assert [(e.trace_id, e.span_id) for e in point.exemplars] == [(ids.trace_id, ids.span_id)]
from kvobs.catalog import BY_NAME
assert tuple(point.explicit_bounds) == BY_NAME["gen_ai.server.request.duration"].buckets
assert [p.value for p in found["kvobs.turns"]] == [1]
assert trace.get_tracer_provider() is tracers and metrics_api.get_meter_provider() is meters
otel.stop()
with tracers.get_tracer("app").start_as_current_span("after"):
    pass
assert len(spans.get_finished_spans()) == 2
""") == ""


def test_of_many_counted_latencies_some_are_recorded_and_the_others_counted_as_lost() -> None:
    """An instrument takes 7 us a value: of 5,000 in one bucket 2,000 reach it, and 3,000 are told as dropped."""
    assert _run(GLOBALS + """
from kvobs.catalog import LATENCY_BUCKETS
from kvobs.model import AllocationLatencies
use_globals()
otel = OtelExporter(Config(), state, "p")
counts = [0] * (len(LATENCY_BUCKETS) + 1)
counts[1], counts[3] = 5_000, 7
state.fold([AllocationLatencies(1, "vgpu:0", tuple(counts), 5_000 * 5_000 + 7 * 200_000)])
otel.tick(state.take_observations())
[point] = points()["kvobs.alloc.latency"]
assert (list(point.bucket_counts)[:4], point.count, dropped()) == ([0, 2_000, 0, 7], 2_007, 3_000)
""") == ""


def test_providers_set_after_the_start_are_found() -> None:
    """Providers that the application sets after kvobs started are used from then on."""
    assert _run(GLOBALS + """
otel = OtelExporter(Config(), state, "p")
turn(otel)
assert not spans.get_finished_spans()
use_globals()
ids = turn(otel)
assert [span.context.trace_id for span in spans.get_finished_spans()] == [ids.trace_id]
assert [p.value for p in points()["kvobs.turns"]] == [2]
""") == ""


def test_after_stop_the_global_provider_keeps_counters_and_loses_gauges() -> None:
    """The application's last collection still has the final values; later ones have counters but no stale gauge."""
    assert _run(GLOBALS + """
use_globals()
otel = OtelExporter(Config(), state, "p")
state.set("kvobs.self.store.size", (), 7)
turn(otel)
otel.stop()
found = points()
assert [p.value for p in found["kvobs.turns"]] == [1] and [p.value for p in found["kvobs.self.store.size"]] == [7]
found = points()
assert [p.value for p in found["kvobs.turns"]] == [1] and "kvobs.self.store.size" not in found
""") == ""


def test_a_restart_reads_the_new_state_through_the_same_instruments() -> None:
    """A second exporter on the same global provider reports its own state, without warnings about duplicates."""
    assert _run(GLOBALS + """
use_globals()
otel = OtelExporter(Config(), state, "p")
turn(otel); turn(otel)
otel.stop()
state = Metrics()
again = OtelExporter(Config(), state, "q")
turn(again)
assert [p.value for p in points()["kvobs.turns"]] == [1]
""") == ""


def test_otlp_off_adds_nothing_to_the_applications_providers() -> None:
    """With otlp off no span and no metric of kvobs enters the global providers, and the caller's span stays current."""
    assert _run(GLOBALS + """
use_globals()
otel = OtelExporter(Config(otlp="off"), state, "p")
with tracers.get_tracer("app").start_as_current_span("request") as request:
    ids = turn(otel)
assert ids.span_id == request.get_span_context().span_id
assert [span.name for span in spans.get_finished_spans()] == ["request"] and points() == {}
""") == ""


def test_without_endpoint_spans_have_ids_and_go_nowhere() -> None:
    """Without an endpoint trace ids are valid and sampled (for exemplars), no thread and no exporter is made."""
    assert _run(SETUP + """
import threading
otel = OtelExporter(Config(), state, "p")
ids = turn(otel)
assert ids.is_valid and ids.trace_flags.sampled
assert not [t for t in threading.enumerate() if t.name.startswith("kvobs")]
assert not [m for m in sys.modules if m.startswith(("opentelemetry.exporter", "grpc"))]
assert not otel.availability().available and "OTEL_EXPORTER_OTLP_ENDPOINT" in otel.availability().reason
otel.flush(); otel.stop()
assert dropped() == 0
""") == ""


@pytest.mark.parametrize("settings", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_SAMPLER": "always_off"}])
def test_a_disabled_sdk_or_sampler_records_no_trace(settings: dict[str, str]) -> None:
    """OTEL_SDK_DISABLED gives no trace at all, OTEL_TRACES_SAMPLER=always_off none that is sampled."""
    assert _run(SETUP + """
otel = OtelExporter(Config(), state, "p")
ids = turn(otel)
assert not ids.trace_flags.sampled
otel.stop()
""", **settings) == ""


def test_without_the_sdk_it_works_and_says_what_to_install() -> None:
    """Without the SDK the tracer does nothing; where OTLP was asked for, one sentence has the pip line."""
    out = _run(BLOCKER + SETUP + """
otel = OtelExporter(Config(), state, "p")
ids = turn(otel); turn(otel)
assert not ids.is_valid
otel.flush(); otel.stop()
value, reason = facts()["otlp"]
assert value == 0 and 'pip install "kvobs[otel]"' in reason and otel.availability().reason == reason
assert dropped() == 0
""", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
    assert out.count("pip install") == 1
    assert _run(BLOCKER + SETUP + "otel = OtelExporter(Config(), state, 'p'); turn(otel); otel.stop()") == ""


def test_an_impossible_setting_is_a_fact() -> None:
    """A value that the OTLP exporter refuses ends in a fact and one warning; the process goes on."""
    out = _run(SETUP + """
otel = OtelExporter(Config(), state, "p")
turn(otel); turn(otel)
otel.stop()
value, reason = facts()["otlp"]
assert value == 0 and "cannot be made" in reason
""", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_EXPORTER_OTLP_TIMEOUT="soon",
               OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert out.count("cannot be made") == 1


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_refusing_endpoint_loses_everything_counted_and_said_once(protocol: str) -> None:
    """Nobody listens: every span and point counts as lost, and each signal's loss is said once."""
    out = _run(SETUP + """
otel = OtelExporter(Config(), state, "p")
for _ in range(3):
    turn(otel)
otel.stop()
assert dropped() >= 3 + 5, dropped()
""", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}", OTEL_EXPORTER_OTLP_PROTOCOL=protocol)
    assert out.count("could not be delivered") == 2
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_silent_endpoint_blocks_neither_ticks_nor_turns(protocol: str) -> None:
    """While an export hangs in a black hole, 1000 turns and ticks complete, and every span is accounted for."""
    with black_hole() as hole:
        out = _run(SETUP + """
from tests.support import wait_until
otel = OtelExporter(Config(), state, "p")
turn(otel)
queue = otel._traces.queue
wait_until(lambda: queue.sender._in_flight == 1, what="the first export is under way")
for _ in range(1000):
    turn(otel)
assert queue.sender._in_flight == 1 and dropped() == 1000 - 64, dropped()
otel.stop()
assert dropped() >= 1001, dropped()
""", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{hole.port}", OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                   OTEL_BSP_SCHEDULE_DELAY="10", OTEL_BSP_MAX_QUEUE_SIZE="64", OTEL_EXPORTER_OTLP_TIMEOUT="20")
        assert hole.reached.is_set()
    assert out.count("could not be delivered") == 2
    assert len(out.splitlines()) == 2
