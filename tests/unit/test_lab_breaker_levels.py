"""The experiment on the virtual GPU, without torch: loads, windows, admission, figures and the table."""

from __future__ import annotations

import itertools
import math

import pytest

from kvobs.breaker import Decision, Limits
from kvobs.breaker.simulator._trace import Request
from kvobs.config import LATENCY_BOUNDS_NS
from kvobs.lab.breaker._front import QUEUE_S, Front, active, waiting
from kvobs.lab.breaker._load import SCALE, TURNS, Load, sessions
from kvobs.lab.breaker._outcome import Outcome, Window, Windows, p95_ns
from kvobs.lab.breaker._results import Results, Settings, bootstrap, rows, share
from kvobs.lab.breaker._table import COLUMNS, table
from kvobs.model import LatencyCounts

SECOND = 1_000_000_000
TRACE = [Request(index * SECOND, 1_000, 200) for index in range(50)]
SLOW = LATENCY_BOUNDS_NS.index(12_000_000) + 1


def test_a_load_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    """Sessions are drawn by their seed alone."""
    load = Load("some", 60, 0.5, 0.5)
    assert sessions(TRACE, load, 3) == sessions(TRACE, load, 3) != sessions(TRACE, load, 4)


def test_an_even_trace_gives_sessions_at_the_asked_rate() -> None:
    """A trace whose requests come at equal distances gives rate times seconds sessions, with halved lengths."""
    found = sessions(TRACE, Load("even", 100, 0.5, 0.5), 0)
    gaps = [after.arrival_s - before.arrival_s for before, after in itertools.pairwise(found)]
    wrapped = [gap for gap in gaps if gap != pytest.approx(2.0)]
    assert all(gap == pytest.approx(0.0) for gap in wrapped)  # where the trace begins again
    assert len(found) in (49, 50)
    assert {turn.answer for one in found for turn in one.turns} == {200 // SCALE}
    assert {one.turns[0].prompt for one in found} == {1_000 // SCALE}
    assert all(TURNS[0] <= len(one.turns) <= TURNS[1] for one in found)


def test_a_rising_load_ends_with_more_than_it_began_with() -> None:
    """Of a load that rises tenfold, the second half brings more than twice as many sessions as the first."""
    found = sessions(TRACE, Load("rising", 100, 0.1, 1.0), 0)
    early = sum(one.arrival_s < 50 for one in found)
    assert len(found) - early > 2 * early > 0


def _counts(fast: int, slow: int) -> LatencyCounts:
    buckets = [0] * (len(LATENCY_BOUNDS_NS) + 1)
    buckets[0], buckets[SLOW] = fast, slow
    return LatencyCounts(fast + slow, 0, 0, 0, tuple(buckets), 1_000 * fast + 20_000_000 * slow, 1)


def test_windows_have_what_grew_within_them() -> None:
    """Counts are differences; one without anything is none; a twentieth of slow allocations is just good enough."""
    now = [_counts(100, 5)]
    windows = Windows(lambda: now[0])
    now[0] = _counts(195, 10)
    windows.cut(0)
    windows.cut(0)
    now[0] = _counts(290, 16)
    windows.cut(2)
    assert windows.found == [Window(100, 5, 0), Window(101, 6, 2)]
    assert [window.fast for window in windows.found] == [True, False]
    assert [window.good for window in windows.found] == [True, False]
    assert Window(100, 0, 1).fast
    assert not Window(100, 0, 1).good
    histogram, seconds = windows.totals()
    assert (sum(histogram), histogram[SLOW]) == (201, 11)
    assert seconds == pytest.approx((190 * 1_000 + 11 * 20_000_000) / 1e9)


def test_the_95th_percentile_is_its_bucket_s_bound() -> None:
    """19 of 20 in the first bucket: its bound; 18 of 20: the slow bucket's; none: not a number."""
    assert p95_ns(_counts(19, 1).buckets) == LATENCY_BOUNDS_NS[0]
    assert p95_ns(_counts(18, 2).buckets) == LATENCY_BOUNDS_NS[SLOW]
    assert math.isnan(p95_ns(_counts(0, 0).buckets))


class _Board:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.now, self.limits = 0, (Limits(), Limits(), Limits())

    def decision(self) -> Decision:
        return Decision(generation=1, level=3, mode="act", limits=self.limits, retry_after_s=1.0,
                        expires_ns=self.now + SECOND)


def test_admission_follows_the_gate() -> None:
    """Limited requests wait while two are active; sheddable ones are refused; later a few at a time enter."""
    board = _Board()
    front = Front(board, lambda: board.now)  # type: ignore[arg-type]
    first, _ = front.ask("a", "normal")
    assert front.ask("a2", "normal")[0] is not None
    board.limits = (Limits(), Limits(max_new_tokens=10), Limits(admit=False))
    assert front.ask("b", "sheddable")[0] is None
    lines = [front.ask(name, "normal")[0] for name in "cdef"]
    critical, limits = front.ask("g", "critical")
    assert critical is not None
    assert active(critical)
    assert limits == Limits()
    assert all(ticket is not None and waiting(ticket) for ticket in lines)
    board.limits = (Limits(), Limits(), Limits())
    front.settle()
    assert [active(ticket) for ticket in lines if ticket is not None] == [True, True, False, False]
    board.now += round(QUEUE_S * SECOND) + 1
    front.settle()
    assert not any(waiting(ticket) for ticket in lines if ticket is not None)
    assert first is not None
    front.leave(first)


def test_shares_have_the_exact_interval() -> None:
    """Of 20 without a miss the lower end solves p^20 = 0.025, and the upper end is 1; halves are symmetric."""
    found = share(20, 20)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.025 ** (1 / 20), abs=1e-9)
    middle = share(10, 20)
    assert middle.low + middle.high == pytest.approx(1.0, abs=1e-9)


def test_the_bootstrap_covers_a_mean() -> None:
    """The interval of a mean of 0 and 1 is that of the binomial over 50, and of equal values it is a point."""
    found = bootstrap([0, 1] * 25, lambda drawn: sum(drawn) / len(drawn), 4_000)
    assert found.value == 0.5
    assert (found.low, found.high) == (pytest.approx(0.36, abs=0.03), pytest.approx(0.64, abs=0.03))
    flat = bootstrap([2.0] * 5, lambda drawn: sum(drawn) / 5, 100)
    assert (flat.low, flat.high) == (2.0, 2.0)


def _run(arm: str, seed: int, tokens: int, errors: int = 0) -> Outcome:
    return Outcome(arm=arm, load="rising", seed=seed, admitted=10, finished=10 - errors, errors=errors, tokens=tokens,
                   steps=90, allocation_s=9.0, action_s=1.0, windows=[Window(100, 0, errors), Window(100, 0, 0)],
                   histogram=list(_counts(199, 1).buckets), answers=f"{seed}")


def test_rows_compare_with_the_baseline_of_the_same_seeds() -> None:
    """Sums, shares of windows, goodput per second and the ratio of goodputs are those of the runs by hand."""
    runs = [_run("baseline", 0, 1_000, 2), _run("baseline", 1, 1_000), _run("act", 0, 1_500), _run("act", 1, 1_500)]
    base, act = rows(runs)
    assert (base.errors, base.finished, base.admitted, base.ratio) == (2, 18, 20, None)
    assert (base.fast.value, base.good.value, act.good.value) == (1.0, 0.75, 1.0)
    assert (base.goodput.value, act.goodput.value) == (10.0, 15.0)
    assert act.ratio is not None
    assert (act.ratio.value, act.ratio.low, act.ratio.high) == (1.5, 1.5, 1.5)
    assert act.same_answers == 2
    assert act.slow == 0.0


def test_the_table_has_a_line_per_row_and_a_cell_per_column() -> None:
    """Markdown: as many cells in every line as there are columns."""
    settings = Settings(trace="t", latency="L40S", device_bytes=1, weight_bytes=1, bytes_per_token=1, tokens_per_step=1,
                        loads={}, arms={}, seeds=[0], versions={}, machine="m", processors=1, load_before=0.0)
    lines = table(Results(settings, [_run("baseline", 0, 1_000), _run("act", 0, 1_000)])).splitlines()
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
