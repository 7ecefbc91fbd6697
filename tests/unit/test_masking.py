"""Planted secrets in every part of a span, on their way through real providers, and that nothing else is changed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace

pytest.importorskip("opentelemetry.sdk.trace", reason="The OpenTelemetry SDK is missing: pip install 'kvobs[otel]'.")
pytest.importorskip("opentelemetry.exporter.otlp.proto.common", reason="pip install 'kvobs[otel]' brings OTLP.")
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvobs import spans
from kvobs.config import load
from kvobs.exporters import OtelExporter, _sdk, masking_processor
from kvobs.exporters._deny import MASKED, Rules
from kvobs.exporters._masking import MaskingProcessor, masked_span
from kvobs.exporters._sdk import Meters, Traces
from kvobs.exporters._tracers import MaskedTracer
from kvobs.metrics import Metrics
from tests.events import turn

SECRET = "hunter2-is-planted"
REMOTE = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(1))
PLAIN = {"gen_ai.usage.input_tokens": 17, "kvobs.kv.bytes": 4111111111111111, "kvobs.device": "cpu", "ok": True,
         "share": 0.25, "layers": (1, 2, 3), "names": ("a", "b"), "kvobs.session": "s-1"}


def write(tracer: trace.Tracer, secret: str = SECRET) -> None:
    """One span that holds the secret wherever a span can hold a text."""
    span = tracer.start_span(f"GET redis://:{secret}@cache", kind=SpanKind.CLIENT, start_time=10, attributes={
        **PLAIN, "db.password": secret, "url": f"https://anna:{secret}@host/x", "argv": ("run", f"--api-key={secret}")},
        links=[Link(REMOTE, {"auth_token": secret, "kind": "cause"})])
    span.set_attribute("note", f"password={secret}, retried")
    span.set_attributes({"apiKey": secret, "gen_ai.input.messages": f"hello {secret}"})
    span.add_event("sent", {"header": f"Authorization: Bearer {secret}", "bytes": 12}, timestamp=11)
    span.add_event(f"token_secret={secret}", {"plain": "yes"}, timestamp=12)
    message = f"cannot reach mongodb://app:{secret}@db/x"
    try:
        raise ConnectionError(message)
    except ConnectionError as error:
        span.record_exception(error, timestamp=13)
        span.set_status(Status(StatusCode.ERROR, f"ConnectionError: mongodb://app:{secret}@db/x"))
    span.end(20)


def plain(tracer: trace.Tracer) -> None:
    """One span without a secret."""
    span = tracer.start_span("text_completion tiny", attributes=PLAIN, links=[Link(REMOTE, {"kind": "cause"})],
                             start_time=10)
    span.add_event("moved", {"bytes": 12, "text": "to cpu"}, timestamp=11)
    try:
        raise ValueError("no blocks left")
    except ValueError as error:
        span.record_exception(error, timestamp=12)
    span.set_status(Status(StatusCode.ERROR, "no blocks left"))
    span.end(20)


def exported(work: Callable[[trace.Tracer], None], *, mask: bool = True,
             limits: SpanLimits | None = None) -> tuple[ReadableSpan, ReadableSpan]:
    """The span as an unmasked processor of the same provider saw it, and as it was exported behind the mask."""
    seen, out = InMemorySpanExporter(), InMemorySpanExporter()
    provider = TracerProvider(span_limits=limits, resource=Resource({"service.name": "x"}), shutdown_on_exit=False)
    behind = SimpleSpanProcessor(out)
    provider.add_span_processor(masking_processor(behind) if mask else behind)
    provider.add_span_processor(SimpleSpanProcessor(seen))
    work(provider.get_tracer("test", "1", attributes={"scope": "s"}))
    provider.shutdown()
    return seen.get_finished_spans()[0], out.get_finished_spans()[0]


def wire(span: ReadableSpan) -> bytes:
    """What an OTLP exporter would send."""
    return encode_spans([span]).SerializeToString()  # type: ignore[no-any-return]


def test_planted_secrets_do_not_leave() -> None:
    """Neither the OTLP message nor the JSON form of the exported span holds the secret; the unmasked one does."""
    seen, out = exported(write)
    assert SECRET.encode() in wire(seen)
    assert SECRET.encode() not in wire(out)
    assert SECRET not in out.to_json()


def test_each_part_is_masked_where_the_secret_is_and_nowhere_else() -> None:
    """Every part by hand: what is left of name, attributes, events, exception, status and link."""
    seen, out = exported(write)
    assert out.name == "GET redis://:[masked]@cache"
    assert dict(out.attributes or {}) == {
        **PLAIN, "db.password": MASKED, "url": "https://anna:[masked]@host/x", "argv": ("run", "--api-key=[masked]"),
        "note": "password=[masked], retried", "apiKey": MASKED, "gen_ai.input.messages": MASKED}
    sent, named, failed = out.events
    assert (sent.name, dict(sent.attributes or {}), sent.timestamp) == (
        "sent", {"header": "Authorization: [masked]", "bytes": 12}, 11)
    assert (named.name, dict(named.attributes or {}), named.timestamp) == (
        "token_secret=[masked]", {"plain": "yes"}, 12)
    assert (failed.name, failed.timestamp) == ("exception", 13)
    assert failed.attributes is not None
    assert failed.attributes["exception.message"] == "cannot reach mongodb://app:[masked]@db/x"
    assert failed.attributes["exception.type"] == "ConnectionError"
    before = str((seen.events[2].attributes or {})["exception.stacktrace"])
    assert str(failed.attributes["exception.stacktrace"]) == before.replace(f":{SECRET}@", ":[masked]@")
    assert before.count(SECRET) >= 1
    assert (out.status.status_code, out.status.description) == (
        StatusCode.ERROR, "ConnectionError: mongodb://app:[masked]@db/x")
    assert [(link.context, dict(link.attributes or {})) for link in out.links] == [
        (REMOTE, {"auth_token": MASKED, "kind": "cause"})]
    for name in ("context", "parent", "kind", "start_time", "end_time", "resource", "instrumentation_scope"):
        assert getattr(out, name) == getattr(seen, name), name


def test_a_span_without_a_secret_is_passed_on_itself() -> None:
    """The very same object, and so byte for byte what an exporter without the mask sends."""
    seen, out = exported(plain)
    assert masked_span(seen, Rules(payloads=True)) is seen
    assert wire(out) == wire(seen)


def test_the_original_span_is_not_changed() -> None:
    """Another processor of the provider still sees what was written: the mask protects its own exporter only."""
    seen, _ = exported(write)
    unmasked, same = exported(write, mask=False)
    assert SECRET in seen.to_json()
    assert json.loads(seen.to_json())["attributes"] == json.loads(unmasked.to_json())["attributes"]
    assert SECRET in same.to_json()


def test_what_the_limits_dropped_is_still_told() -> None:
    """A masked span tells as many dropped attributes, events and links as the original."""
    def work(tracer: trace.Tracer) -> None:
        span = tracer.start_span("x", links=[Link(REMOTE, {"b": 1, "c": 2, "password": "a"}) for _ in range(4)],
                                 attributes={f"k{at}": at for at in range(6)} | {"password": "a"})
        for _ in range(5):
            span.add_event("e", {"b": 1, "c": 2, "password": "a"})
        span.end()

    seen, out = exported(work, limits=SpanLimits(max_span_attributes=3, max_events=2, max_links=1,
                                                 max_event_attributes=2, max_link_attributes=2))
    assert [out.dropped_attributes, out.dropped_events, out.dropped_links] == [
        seen.dropped_attributes, seen.dropped_events, seen.dropped_links] == [4, 3, 3]

    def dropped(parts: Any) -> list[int]:
        return [part.dropped_attributes for part in parts]

    assert dropped(out.events) == dropped(seen.events) == [1, 1]
    assert dropped(out.links) == dropped(seen.links) == [1]
    assert all((part.attributes or {})["password"] == MASKED for part in (*out.events, *out.links))


class Taken:
    """An OTLP exporter's interface that keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, batch: Any) -> SpanExportResult:
        self.spans += batch
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resource with a password, as a detector of processes would find it."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"process.command_line=x --password%3D{SECRET}")


def pushed(work: Callable[[trace.Tracer], None], rules: Rules | None) -> tuple[list[ReadableSpan], int]:
    """What kvobs's own provider pushes, and how many spans were lost."""
    taken, lost = Taken(), [0]

    def lose(number: int) -> None:
        lost[0] += number
    own = Traces(os.environ, "p", taken, lose, rules=rules)
    work(own.provider.get_tracer("kvobs"))
    assert own.queue is not None
    own.queue.pusher.wait(own.queue.pusher.ask(), 30)
    own.queue.pusher.finish()
    own.queue.pusher.join(30)
    return taken.spans, lost[0]


@pytest.mark.usefixtures("command_line")
def test_kvobs_own_provider_pushes_masked_spans_and_resources() -> None:
    """With rules, nothing of what it pushes holds the secret, not even the command line in the resource."""
    (span,), lost = pushed(write, Rules(payloads=True))
    assert lost == 0
    assert SECRET.encode() not in wire(span)
    assert span.resource.attributes["process.command_line"] == "x --password=[masked]"
    (span,), _ = pushed(write, None)
    assert SECRET.encode() in wire(span)


def test_a_span_that_cannot_be_searched_is_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may hold anything, so it does not leave; the others of its batch do."""
    rules = Rules(payloads=True)
    text = rules.text

    def fragile(value: str) -> str:
        if value == "bad":
            raise RuntimeError
        return text(value)
    monkeypatch.setattr(rules, "text", fragile)

    def work(tracer: trace.Tracer) -> None:
        for name in ("good", "bad", "fine"):
            tracer.start_span(name).end()
    found, lost = pushed(work, rules)
    assert [span.name for span in found] == ["good", "fine"]
    assert lost == 1


def test_a_span_that_cannot_be_searched_does_not_disturb_the_application(monkeypatch: pytest.MonkeyPatch,
                                                                         caplog: pytest.LogCaptureFixture) -> None:
    """Ending it raises nothing; it is not passed on, and this is counted, and said once without its contents."""
    text = Rules.text

    def fragile(rules: Rules, value: str) -> str:
        if value == SECRET:
            raise RuntimeError(value)
        return text(rules, value)
    monkeypatch.setattr(Rules, "text", fragile)
    out = InMemorySpanExporter()
    provider, processor = TracerProvider(shutdown_on_exit=False), MaskingProcessor(SimpleSpanProcessor(out))
    provider.add_span_processor(processor)
    for name in ("good", SECRET, SECRET, "fine"):
        provider.get_tracer("test").start_span(name).end()
    provider.shutdown()
    assert [span.name for span in out.get_finished_spans()] == ["good", "fine"]
    assert processor.dropped == 2
    (said,) = [record.getMessage() for record in caplog.records if record.name == "kvobs"]
    assert "RuntimeError" in said
    assert SECRET not in said


@pytest.mark.usefixtures("command_line")
def test_the_resource_of_metrics_is_masked_too() -> None:
    """Traces and metrics name the same process the same way."""
    meters = Meters(os.environ, "p", Taken(), lambda _: None, Rules(payloads=False))
    meters.provider.get_meter("x").create_counter("c").add(1)
    data = meters._reader.get_metrics_data()
    assert data is not None
    assert data.resource_metrics[0].resource.attributes["process.command_line"] == "x --password=[masked]"
    meters.pusher.finish()
    assert meters.pusher.join(30)
    meters.provider.shutdown()


def test_with_the_applications_provider_kvobs_masks_its_own_spans() -> None:
    """Written through the masking tracer, the secret is nowhere; what the application writes itself is as it was."""
    out = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(out))
    write(MaskedTracer(provider.get_tracer("kvobs"), Rules(payloads=True)))
    write(provider.get_tracer("application"))
    ours, theirs = out.get_finished_spans()
    assert SECRET.encode() not in wire(ours)
    assert SECRET.encode() in wire(theirs)
    assert {key: value for key, value in (ours.attributes or {}).items() if key in PLAIN} == PLAIN
    assert [event.timestamp for event in ours.events] == [11, 12, 13]
    assert (ours.start_time, ours.end_time, ours.kind) == (10, 20, SpanKind.CLIENT)
    provider.shutdown()


def test_with_the_applications_provider_a_turn_is_whole() -> None:
    """A turn that fails is written masked: its parents, children, events and figures are those of an unmasked one."""
    def run(mask: bool) -> dict[str, ReadableSpan]:
        out = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(out))
        tracer = provider.get_tracer("kvobs")
        opened = spans.open_turn(MaskedTracer(tracer, Rules(payloads=True)) if mask else tracer, "tiny", 10**9, {})
        assert (trace.get_current_span() is opened.span) is True
        tracer.start_span("the host's, within").end()
        opened.leave()
        opened.close(turn(), [spans.Mark(1, "moved", {"bytes": 1})], {"kvobs.prompt.token_ids": [1, 2]},
                     RuntimeError(f"no route to http://u:{SECRET}@h"))
        provider.shutdown()
        return {span.name: span for span in out.get_finished_spans()}

    masked, bare = run(True), run(False)
    assert set(masked) == set(bare) == {"text_completion tiny", "prefill", "decode", "the host's, within"}
    root = masked["text_completion tiny"]
    assert {span.parent.span_id for span in masked.values() if span.parent} == {root.context.span_id}
    assert dict(root.attributes or {}) == dict(bare["text_completion tiny"].attributes or {}) | {
        "kvobs.prompt.token_ids": MASKED}
    assert root.status.description == "no route to http://u:[masked]@h"
    assert [event.name for event in root.events] == ["moved", "exception"]
    assert all(SECRET.encode() not in wire(span) for span in masked.values())


def of_own(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ReadableSpan:
    """The span that kvobs's own provider pushes."""
    taken = Taken()
    monkeypatch.setattr(_sdk, "exporter_class", lambda *_: lambda: taken)
    otel = OtelExporter(load({}, trace_sample="100%", otlp="on", **settings), Metrics(), "p", {
        "OTEL_METRICS_EXPORTER": "none"})
    write(otel.tracer())
    otel.flush()
    otel.stop()
    return taken.spans[0]


def of_the_application(settings: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ReadableSpan:
    """kvobs's span in the application's own provider, which masks nothing."""
    out = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(out))
    monkeypatch.setattr("kvobs.exporters._otel.global_tracer_provider", lambda: provider)
    otel = OtelExporter(load({}, **settings), Metrics(), "p", {})
    write(otel.tracer())
    otel.stop()
    provider.shutdown()
    return out.get_finished_spans()[0]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("settings", "password", "message"), [
    ({}, SECRET, f"hello {SECRET}"),
    ({"profile": "production"}, MASKED, MASKED),
    ({"profile": "staging"}, MASKED, f"hello {SECRET}"),
    ({"profile": "ci"}, MASKED, f"hello {SECRET}"),
    ({"profile": "production", "mask": "off"}, SECRET, f"hello {SECRET}"),
    ({"mask": "payloads"}, MASKED, MASKED),
])
def test_the_settings_decide_what_is_masked(own: bool, settings: dict[str, str], password: str, message: str,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Production masks payloads too, the other profiles secrets only, and without a profile nothing is masked."""
    span = (of_own if own else of_the_application)(settings, monkeypatch)
    found = span.attributes or {}
    assert (found["db.password"], found["gen_ai.input.messages"]) == (password, message)
    assert (SECRET in str(span.status.description)) is (password == SECRET)
