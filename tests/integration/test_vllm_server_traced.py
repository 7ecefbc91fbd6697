"""A real vLLM server whose own tracing is on: kvobs adds to its spans. Then its engine core is killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("opentelemetry.proto", reason="The OTLP exporters are not installed (extra otel).")
from kvobs.store import StoreReader, preemptions
from tests.peers import http_get
from tests.support import wait_until
from tests.vllm_server import Span, answers, interpreter, make_model, receiving, serving

pytestmark = [pytest.mark.slow, pytest.mark.peer]
TEXT = "The quick brown fox jumps over the lazy dog. "
PLAN: list[dict[str, Any]] = [
    *({"number": n, "prompt": TEXT * 2 + str(n), "max_tokens": 150, "stream": True} for n in range(1, 9)),
    {"number": 9, "prompt": TEXT, "max_tokens": 20, "n": 2},
    {"number": 10, "prompt": TEXT, "max_tokens": 400, "stop": ["e", "t", "a", "o"]},
]
LAST = [{"number": n, "prompt": f"{n} " * 20, "max_tokens": 400, "stream": True} for n in range(101, 105)]


class Recorded(NamedTuple):
    """What was left of a server's life."""

    seen: dict[int, dict[str, Any]]
    spans: list[Span]
    reader: StoreReader
    killed: int


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """One server: a load, then SIGKILL of its engine core while requests run."""
    interpreter()
    here = tmp_path_factory.mktemp("traced")
    store = here / "store"
    with receiving() as (address, spans):
        settings = {"KVOBS_STORE": str(store), "KVOBS_PROMETHEUS": "127.0.0.1:0", "VLLM_PLUGINS": "kvobs",
                    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        options = ("--otlp-traces-endpoint", f"{address}/v1/traces")
        with serving(make_model(here), here, *options, settings=settings) as server:
            seen = server.asked(PLAN)
            wait_until(lambda: sum(span.name == "llm_request" for span in spans) >= len(PLAN) + 1,
                       what="vLLM has written its spans")
            client = server.asks(LAST)
            wait_until(lambda: server.running() > 0, what="requests run")
            processes = json.loads(http_get(f"{server.url}/kvobs")[2])["processes"]
            killed, = (process["pid"] for process in processes if process["role"] == "engine_core")
            os.kill(killed, signal.SIGKILL)
            answers(client)
        yield Recorded({one["number"]: one for one in seen}, spans, StoreReader(store), killed)


def roots(recorded: Recorded, number: int) -> list[Span]:
    """Spans of a request's trace that are children of the client's own."""
    return [span for span in recorded.spans if int(span.trace, 16) == number and span.parent == f"{number:016x}"]


def test_no_second_request_span_is_opened(recorded: Recorded) -> None:
    """Below the client's span there are vLLM's own ``llm_request`` spans alone, one per choice."""
    for request in PLAN:
        assert [span.name for span in roots(recorded, request["number"])] == ["llm_request"] * request.get("n", 1)


def test_phases_are_children_of_vllms_span(recorded: Recorded) -> None:
    """The phases of a request are children of its ``llm_request``, in order, without gaps or overlaps."""
    for request in PLAN:
        for root in roots(recorded, request["number"]):
            children = sorted((span for span in recorded.spans if span.parent == root.id),
                              key=lambda span: (span.start_ns, span.end_ns))
            assert {"queued", "prefill", "decode"} <= {span.name for span in children}, request
            assert [after.start_ns for after in children[1:]] == [before.end_ns for before in children[:-1]]
            assert root.start_ns <= children[0].start_ns
            assert root.attributes["gen_ai.usage.completion_tokens"] > 0


def test_a_stop_string_ends_in_the_front_end(recorded: Recorded) -> None:
    """A request that its stop string ended has its phases too, although the engine core was told to abort it."""
    assert recorded.seen[10]["completion"] < 400
    root, = roots(recorded, 10)
    assert {"queued", "prefill", "decode"} <= {span.name for span in recorded.spans if span.parent == root.id}


def test_every_preemption_is_an_event(recorded: Recorded) -> None:
    """There are as many events ``preempted`` below vLLM's spans as preemptions of the load in the store, some."""
    loaded = {turn.record.session for turn in recorded.reader.turns() if int(turn.record.trace_id or "0", 16) < 100}
    told = sum(stored.record.session in loaded for stored in preemptions(recorded.reader))
    events = [event for span in recorded.spans if int(span.trace, 16) < 100 for event in span.events]
    assert sum(event == "kvobs.preempted" for event in events) == told > 0


def test_turns_have_the_clients_trace(recorded: Recorded) -> None:
    """What the engine core tells of a request is of the trace that the client gave it."""
    traces = [int(stored.record.trace_id, 16) for stored in recorded.reader.turns()]
    for request in PLAN:
        assert traces.count(request["number"]) == request.get("n", 1)


def test_the_store_of_a_killed_engine_is_readable(recorded: Recorded) -> None:
    """The killed process is known as dead and not as ended; everything before its last moments is there."""
    assert recorded.reader.problems == []
    engine, = (process for process in recorded.reader.processes() if process.pid == recorded.killed)
    assert not engine.alive
    assert engine.ended_wall_ns is None
    assert {stored.process for stored in recorded.reader.blocks()} == {engine.process}
