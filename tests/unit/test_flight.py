"""The flight recorder: the last minute, bounded, and one record per out-of-memory error."""

from __future__ import annotations

import itertools
import json

from kvobs import model
from kvobs.catalog import BY_NAME
from kvobs.flight import LIMIT_CHARACTERS, SECONDS, FlightRecorder
from kvobs.metrics import Histogram
from tests.events import ORIGIN, step

SECOND = 1_000_000_000
USAGE, HIDDEN = BY_NAME["kvobs.kv.usage"], BY_NAME["kvobs.self.events"]


def recorder(seconds: int, series: int = 1) -> FlightRecorder:
    found = FlightRecorder()
    for second in range(seconds):
        found.note(second * SECOND, [
            (USAGE, {(f"m{number}", "cpu", "x", "held"): second for number in range(series)}),
            (HIDDEN, {(): 1}), (BY_NAME["kvobs.alloc.latency"], {("cpu",): Histogram((1.0,))})])
    return found


def oom(t_ns: int) -> model.OutOfMemory:
    return model.OutOfMemory(t_ns, ORIGIN, "anna", "out of memory")


def records(found: list[model.Event]) -> list[model.FlightRecord]:
    return [event for event in found if isinstance(event, model.FlightRecord)]


def test_the_last_minute_is_told_oldest_first() -> None:
    """Of 100 seconds the last 60 are kept, each with its age; only the chosen metrics are in it."""
    windows = json.loads(recorder(100).windows(100 * SECOND))
    assert windows["age_s"] == list(range(60, 0, -1))
    assert windows["series"] == {"kvobs.kv.usage{model=m0,device=cpu,cache=x,state=held}": list(range(40, 100))}


def test_what_was_absent_is_null() -> None:
    """A series without a value in a second has null there, not zero and not the value before."""
    found = FlightRecorder()
    found.note(0, [(USAGE, {("m", "cpu", "x", "held"): 1})])
    found.note(SECOND, [])
    assert list(json.loads(found.windows(SECOND))["series"].values()) == [[1, None]]


def test_a_record_is_bounded_and_stays_json() -> None:
    """However many series there are, the text stays within its limit and parses; the newest seconds stay."""
    windows = json.loads(recorder(SECONDS, series=5_000).windows(SECONDS * SECOND))
    assert len(json.dumps(windows, separators=(",", ":"))) <= LIMIT_CHARACTERS
    assert windows["age_s"][-1] == 1
    assert len(windows["series"]) <= 200


def test_an_error_gives_a_record_and_stays_told() -> None:
    """An out-of-memory error without a record of its own gets one, behind it; other events pass unchanged."""
    found = recorder(3).complete([step(), oom(3 * SECOND)])
    assert found[:2] == [step(), oom(3 * SECOND)]
    (record,) = records(found)
    assert (record.reason, record.device, record.message, record.snapshot) == (
        "out_of_memory", "cpu", "out of memory", "")
    assert json.loads(record.windows)["age_s"] == [3, 2, 1]


def test_the_allocator_s_own_record_comes_first() -> None:
    """A record with a snapshot gets the minute added, and the error that follows it within a second no second one."""
    own = model.FlightRecord(3 * SECOND, "out_of_memory", "cuda:0", 512, "", "", '{"segments":1}')
    (record,) = records(recorder(3).complete([own, oom(3 * SECOND + 1)]))
    assert (record.device, record.requested_bytes, record.snapshot) == ("cuda:0", 512, '{"segments":1}')
    assert json.loads(record.windows)["age_s"] == [3, 2, 1]


def test_a_storm_of_errors_is_told_but_recorded_rarely() -> None:
    """Of 600 errors in a minute all are told, at most one per second and ten in all are recorded."""
    found = recorder(1)
    told = [found.complete([oom(number * SECOND // 10)]) for number in range(600)]
    events = [event for events in told for event in events]
    assert sum(isinstance(event, model.OutOfMemory) for event in events) == 600
    times = [record.t_ns for record in records(events)]
    assert len(times) == 10
    assert all(later - earlier >= SECOND for earlier, later in itertools.pairwise(times))
    assert records(found.complete([oom(61 * SECOND)]))
