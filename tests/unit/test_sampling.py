"""Sampling by profile, counted on 20,000 traces, and the depth of what is written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
from opentelemetry import trace

from kvobs import spans
from kvobs.config import load
from kvobs.exporters import OtelExporter
from kvobs.metrics import Metrics
from kvobs.sources.vllm import _children
from tests.events import turn

pytest.importorskip("opentelemetry.sdk.trace", reason="The OpenTelemetry SDK is missing: pip install 'kvobs[otel]'.")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

TRACES = 20_000
RATES = {"production": 0.015, "staging": 0.15, "ci": 1.0}  # the article's (S18)
MISSED = 1e-6  # how often a right sampler fails a test
Make = Callable[..., tuple[OtelExporter, InMemorySpanExporter]]


def binomial_bounds(number: int, rate: float, missed: float) -> tuple[int, int]:
    """The narrowest counts that a binomial variable leaves with at most ``missed / 2`` on either side, from its exact
    distribution.
    """
    if rate in (0.0, 1.0):
        return round(number * rate), round(number * rate)
    chances = [math.exp(math.lgamma(number + 1) - math.lgamma(hits + 1) - math.lgamma(number - hits + 1)
                        + hits * math.log(rate) + (number - hits) * math.log1p(-rate)) for hits in range(number + 1)]
    below = list(itertools.accumulate(chances))
    above = list(itertools.accumulate(reversed(chances)))
    low = next(hits for hits, chance in enumerate(below) if chance > missed / 2)
    high = number - next(hits for hits, chance in enumerate(above) if chance > missed / 2)
    return low, high


@pytest.fixture
def make() -> Iterator[Make]:
    """An exporter as a process has it, and what its own provider would push."""
    made = []

    def build(environ: dict[str, str] | None = None, **settings: str) -> tuple[OtelExporter, InMemorySpanExporter]:
        otel = OtelExporter(load({}, **settings), Metrics(), "p", environ or {})
        otel.tracer()
        assert otel._traces is not None
        found = InMemorySpanExporter()
        otel._traces.provider.add_span_processor(SimpleSpanProcessor(found))
        made.append(otel)
        return otel, found
    yield build
    for otel in made:
        otel.stop()


def run_turn(tracer: trace.Tracer) -> tuple[str, str, bool]:
    opened = spans.open_turn(tracer, "tiny", 10**9, {})
    opened.leave()
    opened.close(turn(), (), {}, None)
    return opened.ids


def test_the_bounds_are_those_of_the_distribution() -> None:
    """Against a case by hand: of 10 fair coins, 1 to 9 heads in all but 2 of 1,024 cases, 0 to 10 in all."""
    assert binomial_bounds(10, 0.5, 2 / 1024 + 1e-12) == (1, 9)
    assert binomial_bounds(10, 0.5, 2 / 1024 - 1e-12) == (0, 10)
    assert binomial_bounds(TRACES, 1.0, MISSED) == (TRACES, TRACES)


@pytest.mark.parametrize("profile", RATES)
def test_the_rate_of_a_profile_lies_in_the_exact_bounds(profile: str, make: Make) -> None:
    """Of 20,000 turns without a parent, as many traces are recorded as the rate allows, each of them whole; which ones
    is what the OpenTelemetry specification says of their ids.
    """
    otel, found = make(profile=profile)
    tracer, rate = otel.tracer(), RATES[profile]
    sampled = {}
    for _ in range(TRACES):
        trace_id, _, chosen = run_turn(tracer)
        sampled[trace_id] = chosen
    assert len(sampled) == TRACES
    low, high = binomial_bounds(TRACES, rate, MISSED)
    assert low <= sum(sampled.values()) <= high
    assert all(chosen == (int(trace_id[16:], 16) < round(rate * 2**64)) for trace_id, chosen in sampled.items())
    written: dict[str, int] = {}
    for span in found.get_finished_spans():
        key = trace.format_trace_id(span.context.trace_id)
        written[key] = written.get(key, 0) + 1
    whole = 1 if profile == "ci" else 3
    assert written == {trace_id: whole for trace_id, chosen in sampled.items() if chosen}


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("profile", RATES)
def test_a_parents_decision_is_followed_both_ways(profile: str, remote: bool, make: Make) -> None:
    """Below a recorded caller every turn is recorded, below one that is not none is, whatever the profile's rate and
    the trace's id.
    """
    otel, found = make(profile=profile)
    tracer = otel.tracer()
    for low_bits in (1, 2**63, 2**64 - 1):
        for flag in (0, 1):
            parent = SpanContext(2**64 + low_bits, 5, is_remote=remote, trace_flags=TraceFlags(flag))
            span = tracer.start_span("x", set_span_in_context(NonRecordingSpan(parent)))
            assert span.get_span_context().trace_id == parent.trace_id
            assert span.get_span_context().trace_flags.sampled is bool(flag)
            assert span.is_recording() is bool(flag)
            span.end()
    assert len(found.get_finished_spans()) == 3
    assert all(span.parent is not None and span.parent.trace_flags.sampled for span in found.get_finished_spans())


@pytest.mark.parametrize(("percent", "parent", "expected"), [("0%", 1, True), ("100%", 0, False)])
def test_a_parent_wins_over_the_extremes(percent: str, parent: int, expected: bool, make: Make) -> None:
    """At 0 % a recorded caller is followed, at 100 % one that is not recorded is too."""
    otel, _ = make(trace_sample=percent)
    context = set_span_in_context(NonRecordingSpan(SpanContext(3, 5, is_remote=True, trace_flags=TraceFlags(parent))))
    assert otel.tracer().start_span("x", context).is_recording() is expected


def test_without_a_profile_the_sdk_decides(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new trace by default, none where OTEL_TRACES_SAMPLER says so, and the setting wins over it."""
    otel, _ = make()
    assert all(otel.tracer().start_span("x").is_recording() for _ in range(200))
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    otel, _ = make()
    assert not any(otel.tracer().start_span("x").is_recording() for _ in range(200))
    otel, _ = make(trace_sample="100%")
    assert all(otel.tracer().start_span("x").is_recording() for _ in range(200))


def test_metrics_are_never_sampled(make: Make) -> None:
    """With no trace recorded, every turn and every token is counted."""
    otel, found = make(trace_sample="0%")
    metrics = Metrics()
    for _ in range(300):
        trace_id, span_id, chosen = run_turn(otel.tracer())
        metrics.fold([turn(trace_id=trace_id, span_id=span_id, sampled=chosen)])
    assert found.get_finished_spans() == ()
    counted = {row.name: sum(values.values()) for row, values in metrics.collect() if row.kind == "counter"}
    assert counted["kvobs.turns"] == 300


PHASES = (_children.Phase("queued", 1, 2, ()), _children.Phase("prefill", 2, 3, (("e", 2, {}),)))
LAYERS = [spans.LayerCall(0, "full", "sdpa", 10, 20), spans.LayerCall(1, "full", "sdpa", 20, 30)]


def write_all(tracer: trace.Tracer) -> None:
    """Every kind of span that kvobs writes of a turn, and one as the breaker writes it."""
    opened = spans.open_turn(tracer, "tiny", 10**9, {})
    spans.layer_spans(tracer, opened.span, 0, LAYERS, {})
    _children.write(tracer, opened.span, PHASES, 9)
    opened.leave()
    opened.close(turn(), [spans.Mark(1, "moved", {})], {"a": 1}, None)
    tracer.start_span("kvobs.breaker.action").end()


def test_depth(make: Make) -> None:
    """chain writes all; edges a turn's own span, events and attributes included, and the breaker's, and no others."""
    own = {"text_completion tiny", "kvobs.breaker.action"}
    otel, found = make(span_depth="edges")
    write_all(otel.tracer())
    edges = {span.name: span for span in found.get_finished_spans()}
    assert set(edges) == own
    otel, found = make(span_depth="chain")
    write_all(otel.tracer())
    chain = {span.name: span for span in found.get_finished_spans()}
    assert set(chain) == own | {"prefill", "decode", "queued", "sampled step", "attention layer 0", "attention layer 1"}
    for name in own:
        assert edges[name].attributes == chain[name].attributes
        assert [event.name for event in edges[name].events] == [event.name for event in chain[name].events]


def test_depth_holds_with_the_applications_provider_and_its_sampler_stays(
        make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvobs writes no more there than the depth says; how much is sampled is the application's own."""
    out = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(out))
    monkeypatch.setattr("kvobs.exporters._otel.global_tracer_provider", lambda: provider)
    otel = OtelExporter(load({}, profile="ci", trace_sample="0%"), Metrics(), "p", {})
    assert otel.tracer() is otel.tracer()
    write_all(otel.tracer())
    assert {span.name for span in out.get_finished_spans()} == {"text_completion tiny", "kvobs.breaker.action"}
    otel.stop()
    provider.shutdown()
