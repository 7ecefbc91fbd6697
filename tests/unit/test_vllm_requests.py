"""Requests of vLLM's engine core: how they ended, and what goes back to a front end that writes the spans."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs import spans
from kvobs.sources.vllm._requests import OpenRequest, outcome_of, told

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
    found = OpenRequest(SimpleNamespace(request_id="r"), 1_000 * MS, 501_000 * MS)
    found.phases = [("queued", 1_000 * MS, 1_010 * MS), ("prefill", 1_010 * MS, 1_030 * MS)]
    found.phase, found.since_ns = "decode", 1_030 * MS
    found.marks = [spans.Mark(1_005 * MS, "refused", {}), spans.Mark(1_020 * MS, "seen", {"n": 1}),
                   spans.Mark(1_040 * MS, "late", {})]
    assert json.loads(told(found)) == [
        ["queued", 501_000 * MS, 501_010 * MS, [["refused", 501_005 * MS, {}]]],
        ["prefill", 501_010 * MS, 501_030 * MS, [["seen", 501_020 * MS, {"n": 1}]]],
        ["decode", 501_030 * MS, None, [["late", 501_040 * MS, {}]]]]
