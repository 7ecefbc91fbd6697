"""Requests of vLLM's engine core: how they ended, and what goes back to a front end that writes the spans."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import NoOpTracer

from kvobs import model, spans
from kvobs.plugins._vllm import settings
from kvobs.sessions import Names, TurnNumbers
from kvobs.sources.vllm._arrivals import Arrivals
from kvobs.sources.vllm._engine import SHOW_NS, EngineRecord
from kvobs.sources.vllm._requests import Desk, OpenRequest, Sizes, outcome_of, told
from tests.events import ORIGIN

MS = 1_000_000


@pytest.mark.parametrize(("status", "stop", "outcome"), [
    ("FINISHED_STOPPED", [], "ok"), ("FINISHED_LENGTH_CAPPED", ["\n"], "ok"), ("FINISHED_ABORTED", [], "cancelled"),
    ("FINISHED_ABORTED", None, "cancelled"), ("FINISHED_ABORTED", ["\n"], "stopped"),
    ("FINISHED_ERROR", ["\n"], "error"),
])
def test_an_abort_of_a_request_with_stop_strings_is_not_called_a_cancellation(
        status: str, stop: Any, outcome: str) -> None:
    """vLLM's front end aborts what a stop string ends, so of such requests the engine core cannot say who left."""
    request = SimpleNamespace(status=SimpleNamespace(name=status), sampling_params=SimpleNamespace(stop=stop))
    assert outcome_of(request) == outcome


def test_phases_travel_in_unix_time_with_their_events() -> None:
    """Each event is in the phase it fell into, the phase that goes on has no end, and times are on the wall clock."""
    found = OpenRequest(SimpleNamespace(request_id="r"), ORIGIN, 1_000 * MS, 501_000 * MS)
    found.phases = [("queued", 1_000 * MS, 1_010 * MS), ("prefill", 1_010 * MS, 1_030 * MS)]
    found.phase, found.since_ns = "decode", 1_030 * MS
    found.marks = [spans.Mark(1_005 * MS, "refused", {}), spans.Mark(1_020 * MS, "seen", {"n": 1}),
                   spans.Mark(1_040 * MS, "late", {})]
    assert json.loads(told(found)) == [
        ["queued", 501_000 * MS, 501_010 * MS, [["refused", 501_005 * MS, {}]]],
        ["prefill", 501_010 * MS, 501_030 * MS, [["seen", 501_020 * MS, {"n": 1}]]],
        ["decode", 501_030 * MS, None, [["late", 501_040 * MS, {}]]]]


def test_a_request_is_received_before_the_scheduler_takes_it_in() -> None:
    """Requests wait in the order in which they came, with their own time, until each is taken once."""
    arrivals = Arrivals(lambda request: f"session of {request.request_id}")
    for name, tokens in (("a", 5), ("b", 7), ("a", 9), ("c", 3)):
        arrivals.received(SimpleNamespace(request_id=name, num_prompt_tokens=tokens))
    first, second, third = arrivals.waiting()
    assert (first.request, first.session, first.prompt_tokens) == ("a", "session of a", 5)
    assert (second.request, second.prompt_tokens) == ("b", 7)
    assert first.received_ns <= second.received_ns <= third.received_ns
    assert [arrivals.taken(name) for name in ("a", "never", "c", "a", "c")] == [
        first.received_ns, None, third.received_ns, None, None]
    assert arrivals.waiting() == []  # b came before c, so it is no more in the queue either


def test_what_was_received_before_a_pause_does_not_wait_for_ever() -> None:
    """After a pause nobody is said to wait who was taken in meanwhile, unseen."""
    arrivals = Arrivals(lambda request: "")
    arrivals.received(SimpleNamespace(request_id="a", num_prompt_tokens=5))
    arrivals.clear()
    assert arrivals.waiting() == []
    assert arrivals.taken("a") is None


@pytest.mark.parametrize(("status", "told"), [("FINISHED_STOPPED", True), ("FINISHED_LENGTH_CAPPED", True),
                                              ("FINISHED_ABORTED", False), ("FINISHED_ERROR", False)])
def test_the_time_per_token_is_of_requests_that_came_to_their_end(status: str, told: bool) -> None:
    """A request that was ended from outside may have waited since its last token, so that it tells none."""
    emitted: list[model.Event] = []
    desk = Desk(lambda: NoOpTracer(), emitted.append, Names("plain"), TurnNumbers())
    request = SimpleNamespace(request_id="r", session_id=None, trace_headers=None, num_prompt_tokens=4,
                              num_output_tokens=3, status=SimpleNamespace(name=status), sampling_params=None)
    origin = model.Origin("vllm", "tiny", "BlockPool", "cpu", "bfloat16")
    found = desk.open(request, origin, None)
    found.first_ns = found.arrived_ns + MS
    desk.close(found, origin, 1, 2, Sizes(200, 1_000, 500, 70))
    (turn,) = (event for event in emitted if isinstance(event, model.Turn))
    assert (turn.tpot_ns is not None) == told
    assert (turn.ttft_ns, turn.kv_bytes, turn.kv_reserved_bytes, turn.kv_largest_bytes, turn.bytes_written) == (
        MS, 200, 1_000, 500, 70)
    if told:
        assert turn.tpot_ns == (turn.t_ns - turn.start_ns - MS) // 2


def test_who_looks_from_another_thread_sees_a_scheduler_at_rest_or_nothing() -> None:
    """While the scheduler is called, or if it was called meanwhile, nothing is told; between its calls it is."""
    record: Any = object.__new__(EngineRecord)
    record._scheduler, record._shown_ns, record._resting, record._moves = (lambda: "scheduler"), 0, True, 0
    record._states = lambda scheduler, now, show: [scheduler, now, show]
    assert record.seen(SHOW_NS - 1) == []
    assert record.seen(SHOW_NS) == ["scheduler", SHOW_NS, True]
    record.entering()
    assert record.seen(SHOW_NS) == []
    record.leaving()
    assert record.seen(SHOW_NS) == ["scheduler", SHOW_NS, True]

    def overtaken(*_: Any) -> list[Any]:
        record.entering()
        record.leaving()
        return ["torn"]

    record._states = overtaken
    assert record.seen(SHOW_NS) == []


@pytest.mark.parametrize(("process", "environment", "expected"), [
    ("EngineCore_DP0", {}, {}), ("EngineCore", {"KVOBS_PROMETHEUS": "off"}, {}),
    ("MainProcess", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, {}), ("MainProcess", {}, {"prometheus": "127.0.0.1:0"}),
    ("VllmWorker-0", {"KVOBS_PROMETHEUS": "0.0.0.0:9000"}, {"prometheus": "0.0.0.0:0"}),
    ("MainProcess", {"KVOBS_PROMETHEUS": "[::1]:9000"}, {"prometheus": "[::1]:0"}),
    ("MainProcess", {"KVOBS_PROMETHEUS": "off"}, {}), ("MainProcess", {"KVOBS_STOER": "x"}, {})])
def test_the_configured_port_is_for_the_engine_core(
        process: str, environment: dict[str, str], expected: dict[str, str]) -> None:
    """A front end and a worker leave the port to the process that has the pool, on the host that was configured."""
    assert settings(process, environment) == expected
