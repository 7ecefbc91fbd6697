"""The search for better settings, on demands whose answer is known."""

from __future__ import annotations

import pytest

from kvobs.allocator.recording import Recording
from kvobs.allocator.search import candidates, compare_best, search
from kvobs.allocator.settings import Settings, parse
from kvobs.allocator.whatif import case_of, figures
from tests.allocator_history import MIB
from tests.whatif_recorder import EMPTY, STACKS, Recorder


def bursts(first: int, second: int) -> Recording:
    """128 MiB in pieces of ``first``, freed, and again in pieces of ``second`` (MiB)."""
    allocator = Recorder()
    for address in [allocator.ask(first * MIB) for _ in range(128 // first)]:
        allocator.free(address)
    for _ in range(128 // second):
        allocator.ask(second * MIB)
    return allocator.recording()


def test_expandable_segments_are_found_where_they_are_the_answer() -> None:
    """8 x 16 MiB freed and 4 x 32 MiB: 256 MiB with every classic setting, 140 with expandable segments; the line sets
    them and nothing else.
    """
    recording = bursts(16, 32)
    case = case_of(recording, recording.devices[0])
    found = search(case, case.demand, "as recorded", "Python")
    assert found.line == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert (found.before.figures.peak_reserved_bytes, found.best.figures.peak_reserved_bytes) == (256 * MIB, 140 * MIB)
    assert "116.0 MiB (45.3%) lower" in found.sentence
    assert "modelled" in found.sentence


def test_nothing_is_recommended_where_nothing_is_gained() -> None:
    """4 x 32 MiB freed and 8 x 16 MiB need 128 MiB under any setting: the settings in force stay, and it is said."""
    recording = bursts(32, 16)
    comparison, found = compare_best(case_of(recording, recording.devices[0]), recording, {}, engine="Python")
    assert found.best is found.before
    assert found.line == ""
    assert found.sentence.startswith("None of the settings")
    assert comparison.after == comparison.before


def test_fewer_ooms_count_more_than_less_memory() -> None:
    """Nine segments of 20 MiB, five of which are freed and get 12 MiB each: on a device of 200 MiB 40 MiB more fail
    in segments, and succeed in expandable ones, which is what the search prefers although more is reserved.
    """
    allocator = Recorder()
    kept = [allocator.ask(20 * MIB) for _ in range(9)]
    for address in kept[1:6]:
        allocator.free(address)
    for _ in range(5):
        allocator.ask(12 * MIB)
    allocator.ask(40 * MIB)
    recording = allocator.recording()
    case = case_of(recording, recording.devices[0], 200 * MIB)
    comparison, found = compare_best(case, recording, {}, engine="Python")
    assert found.before.figures.ooms == 1
    assert found.best.figures.ooms == 0
    assert "1 of 1 OOMs less" in found.sentence
    assert comparison.before.ooms == 0  # as recorded, without a limit
    assert comparison.after == found.best.figures
    assert comparison.verdicts_changed == ()


def test_times_that_sources_see_differently_are_not_called_less() -> None:
    """Eight cudaMallocs fewer and pages that are mapped instead: by the fast source (364.5 us a call, 193 us a page)
    that costs more, by the slow one (5,458 us and 568 us) less, and the sentence says both.
    """
    recording = bursts(16, 32)
    case = case_of(recording, recording.devices[0])
    found = search(case, case.demand, "as recorded", "Python")
    (fast, slow), (fast_after, slow_after) = (
        [estimate.ns or 0 for estimate in each.figures.call_time] for each in (found.before, found.best))
    assert fast_after > fast
    assert slow_after < slow
    assert "less or more, by the device, time in calls" in found.sentence


def test_a_time_that_leaves_something_out_says_so() -> None:
    """Pages that are unmapped take a time that no source tells: the sentence names what is not in the comparison."""
    allocator = Recorder()
    for address in [allocator.ask(16 * MIB) for _ in range(8)]:
        allocator.free(address)
    allocator.empty(EMPTY)
    for address in [allocator.ask(32 * MIB) for _ in range(4)] + [allocator.ask(20 * MIB, stream=7)]:
        allocator.free(address)
    allocator.ask(48 * MIB)
    recording = allocator.recording(STACKS)
    case = case_of(recording, recording.devices[0])
    found = search(case, case.demand, "as recorded", "Python")
    assert found.best.figures.unmapped_bytes > 0
    assert "time in calls to the device (estimated, without unmap)" in found.sentence
    assert {name for one in found.best.figures.call_time for name in one.missing} == {"unmap"}


def test_what_serves_where_nothing_was_reserved_is_told() -> None:
    """On 12 MiB, 11 MiB do not fit into a page of 20 and fit into a segment of 12: an OOM less, and 12 MiB more."""
    allocator = Recorder(Settings(expandable_segments=True))
    allocator.ask(11 * MIB)
    recording = allocator.recording()
    _, found = compare_best(case_of(recording, recording.devices[0], 12 * MIB), recording, {}, engine="Python")
    assert (found.before.rank[:2], found.best.rank[:2]) == ((1, 0), (0, 12 * MIB))
    assert "1 of 1 OOMs less, a peak of reserved memory that is 12.0 MiB higher" in found.sentence


def test_every_candidate_is_one_that_pytorch_accepts() -> None:
    """Each candidate's line parses to the candidate; the settings in force come first, and none comes twice."""
    base = parse("max_split_size_mb:64,per_process_memory_fraction:0.9,large_segment_size_mb:40")
    found = list(candidates(base, limited=True))
    assert found[0] == base
    assert len(found) == len(set(found)) == 5 * 5 * 5 + 5  # a limit of 32 MiB is below the large segments
    for one in found:
        assert parse(one.conf()) == one
        assert (one.large_segment_size, one.memory_fraction) == (40 * MIB, 0.9)


@pytest.mark.parametrize(("conf", "limited", "tried"), [
    ("", True, False), ("per_process_memory_fraction:0.5", False, False), ("per_process_memory_fraction:0.5", True,
                                                                           True)])
def test_a_threshold_is_tried_only_where_it_acts(conf: str, limited: bool, tried: bool) -> None:
    """Garbage collection needs a memory fraction and a known capacity; without both no candidate has a threshold."""
    found = candidates(parse(conf), limited)
    assert any(one.garbage_collection_threshold for one in found) is tried


def test_the_best_is_the_best_by_trying_each() -> None:
    """No candidate has fewer OOMs, or as many and a lower peak; progress counts from nothing to all."""
    recording = bursts(16, 32)
    case = case_of(recording, recording.devices[0])
    told: list[tuple[int, int]] = []
    found = search(case, case.demand, "as recorded", "Python", lambda done, total: told.append((done, total)))
    every = [figures(case, case.demand, one, None, "as recorded", "Python")
             for one in candidates(Settings(), limited=False)]
    best = found.best.figures
    assert min((one.ooms, one.peak_reserved_bytes) for one in every) == (best.ooms, best.peak_reserved_bytes)
    assert told == [(done, len(every)) for done in range(len(every) + 1)]
