"""Turns as sessions and spans: names, parents, children, events, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

from opentelemetry import baggage, context, trace

import kvobs
from kvobs import model as events
from tests.contract import tiny
from tests.contract.tiny import named

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


@pytest.fixture
def traced(watching: Callable[..., Any], tracer: Any) -> Any:
    return watching(tracer)


# -- sessions -------------------------------------------------------------------------------------------


def test_without_a_name_each_new_cache_is_a_session(watch: Any, llama: Any) -> None:
    """Calls that share nothing are first turns of different sessions with normal priority."""
    for _ in range(3):
        tiny.greedy(llama, tiny.prompt(4), 2)
    turns = watch.turns()
    assert len({turn.session for turn in turns}) == 3
    assert {(turn.turn, turn.priority) for turn in turns} == {(1, "normal")}


def test_a_named_session_wins_over_the_cache(watch: Any, llama: Any) -> None:
    """Inside ``kvobs.session`` turns belong to it; afterwards the cache goes on in the session it was last used in."""
    cache = transformers.DynamicCache(config=llama.config)
    ids = tiny.greedy(llama, tiny.prompt(4), 2, **{tiny.CACHE: cache})
    with kvobs.session("anna", priority="sheddable"):
        ids = tiny.greedy(llama, ids, 2, **{tiny.CACHE: cache})
        tiny.greedy(llama, tiny.prompt(4), 2)
    tiny.greedy(llama, ids, 2, **{tiny.CACHE: cache})
    own, named_one, other_cache, after = watch.turns()
    assert own.session not in ("", "anna")
    assert [(t.session, t.turn, t.priority) for t in (named_one, other_cache)] == [
        ("anna", 1, "sheddable"), ("anna", 2, "sheddable")]
    assert (after.session, after.turn) == ("anna", 3)


def test_baggage_names_the_session(watch: Any, llama: Any) -> None:
    """``session.id`` and ``session.priority`` of the OpenTelemetry baggage are honoured, an explicit block wins."""
    here = baggage.set_baggage("session.id", "from-web")
    token = context.attach(baggage.set_baggage("session.priority", "critical", here))
    try:
        tiny.greedy(llama, tiny.prompt(4), 2)
        with kvobs.session("inner"):
            tiny.greedy(llama, tiny.prompt(4), 2)
    finally:
        context.detach(token)
    assert [(t.session, t.priority) for t in watch.turns()] == [("from-web", "critical"), ("inner", "normal")]


@pytest.mark.parametrize("mode", ["hashed", "off"])
def test_session_ids_can_be_hidden(watching: Callable[..., Any], tracer: Any, spans: Any, llama: Any,
                                   mode: str) -> None:
    """Hashed ids are a keyed digest, the same for the same session; off leaves none; the plain id appears nowhere."""
    watch = watching(tracer, session_ids=mode, session_key=b"k" * 32)
    for id in ("anna", "anna", "bert"):
        with kvobs.session(id):
            tiny.greedy(llama, tiny.prompt(4), 2)
    seen = watch.events()
    shown = [turn.session for turn in seen if isinstance(turn, events.Turn)]
    everything = repr(seen) + "".join(span.to_json() for span in spans.get_finished_spans())
    assert "anna" not in everything
    assert "bert" not in everything
    if mode == "off":
        assert shown == ["", "", ""]
        assert "gen_ai.conversation.id" not in everything
    else:
        assert shown[0] == shown[1] != shown[2]
        assert all(len(id) == 16 for id in shown)


# -- spans ----------------------------------------------------------------------------------------------


def test_a_call_is_a_span_with_its_totals(traced: Any, spans: Any, llama: Any) -> None:
    """One span per call after the GenAI conventions, prefill and decode inside it, ids equal to the turn's."""
    with kvobs.session("anna"):
        tiny.greedy(llama, tiny.prompt(6, 2), 5)
    turn = traced.turn()
    (span,) = named(spans, "text_completion LlamaForCausalLM")
    found = dict(span.attributes)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.provider.name"] == "transformers"
    assert found["gen_ai.request.model"] == "LlamaForCausalLM"
    assert found["gen_ai.request.max_tokens"] == 5
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (12, 10)
    assert found["gen_ai.conversation.id"] == "anna"
    assert found["kvobs.kv.bytes"] == 10 * tiny.row_bytes(llama, 2)
    assert found["kvobs.kv.reallocations"] == 30
    assert found["kvobs.outcome"] == "ok"
    assert (turn.trace_id, turn.span_id) == (
        trace.format_trace_id(span.context.trace_id), trace.format_span_id(span.context.span_id))
    assert not any("token_ids" in key for key in found)
    (prefill,), (decode,) = named(spans, "prefill"), named(spans, "decode")
    assert {child.parent.span_id for child in (prefill, decode)} == {span.context.span_id}
    assert span.start_time == prefill.start_time < prefill.end_time == decode.start_time < decode.end_time
    assert decode.end_time == span.end_time
    (burst,) = [event for event in span.events if event.name == "kvobs.reallocation_burst"]
    assert dict(burst.attributes) == {"steps": 5, "reallocations": 30, "copied_bytes": turn.bytes_copied}


def test_the_callers_span_is_the_parent_and_streamers_are_inside(traced: Any, tracer: Any, spans: Any,
                                                                 llama: Any) -> None:
    """A surrounding span is the parent; spans made inside the call are its children; then the caller's is current."""

    class Streamer:
        def put(self, value: Any) -> None:
            with tracer.start_as_current_span("stream"):
                pass

        def end(self) -> None:
            pass

    with tracer.start_as_current_span("request") as outer:
        tiny.greedy(llama, tiny.prompt(4), 3, streamer=Streamer())
        assert trace.get_current_span() is outer
    (span,) = named(spans, "text_completion LlamaForCausalLM")
    assert span.parent.span_id == outer.get_span_context().span_id
    assert {child.parent.span_id for child in named(spans, "stream")} == {span.context.span_id}
    assert {child.context.trace_id for child in spans.get_finished_spans()} == {outer.get_span_context().trace_id}


def test_a_bare_loop_is_a_span_of_the_span_it_began_in(traced: Any, tracer: Any, spans: Any, llama: Any) -> None:
    """Written as a whole when it is over, with the parent and the times of its passes, and never made current."""
    cache = transformers.DynamicCache(config=llama.config)
    with tracer.start_as_current_span("request") as outer, torch.no_grad():
        for length in (5, 1, 1):
            llama(input_ids=tiny.prompt(length), **{tiny.CACHE: cache})
            assert trace.get_current_span() is outer
    del cache
    turn = traced.turn()
    (span,), (request,) = named(spans, "text_completion LlamaForCausalLM"), named(spans, "request")
    assert span.parent.span_id == request.context.span_id
    assert request.start_time <= span.start_time < span.end_time <= request.end_time
    assert (turn.new_tokens, span.attributes["kvobs.steps"]) == (2, 3)


def test_an_unsampled_caller_stays_unsampled(traced: Any, spans: Any, llama: Any) -> None:
    """Under a caller whose trace is not sampled nothing is recorded, and the turn says so."""
    parent = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0))
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(parent)))
    try:
        tiny.greedy(llama, tiny.prompt(4), 2)
    finally:
        context.detach(token)
    turn = traced.turn()
    assert (turn.sampled, turn.trace_id, spans.get_finished_spans()) == (False, f"{1:032x}", ())


def test_token_ids_only_when_asked(watching: Callable[..., Any], tracer: Any, spans: Any, llama: Any) -> None:
    """With ``record_prompts`` the span carries the prompt's and the reply's token ids."""
    watching(tracer, record_prompts=True)
    ids = tiny.prompt(4)
    output = tiny.greedy(llama, ids, 3)
    (span,) = named(spans, "text_completion LlamaForCausalLM")
    assert list(span.attributes["kvobs.prompt.token_ids"]) == ids[0].tolist()
    assert list(span.attributes["kvobs.reply.token_ids"]) == output[0, 4:].tolist()


def test_a_migration_is_an_event_of_its_call(traced: Any, spans: Any, llama: Any) -> None:
    """A layer that moves during a call appears on the call's span with route, bytes and time."""
    cache = transformers.DynamicCache(config=llama.config)

    class Mover:
        calls = 0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 3:
                layer = cache.layers[0]
                kept = layer.keys, layer.values
                layer.device = torch.device("meta")
                layer.prefetch()
                layer.keys, layer.values = kept

        def end(self) -> None:
            pass

    tiny.greedy(llama, tiny.prompt(4), 3, streamer=Mover(), **{tiny.CACHE: cache})
    (span,) = named(spans, "text_completion LlamaForCausalLM")
    event = next(event for event in span.events if event.name == "kvobs.migration")
    assert (event.attributes["src"], event.attributes["dst"]) == ("cpu", "meta")
    assert event.attributes["bytes"] == 5 * tiny.row_bytes(llama) // 3
    assert event.attributes["duration_s"] > 0
