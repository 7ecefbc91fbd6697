"""Calibration's arithmetic against exact fractions, enumeration and naive copies."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.slo.calibration import Sample, Unreadable, in_windows, read_csv
from kvobs.slo.calibration._binomial import lower_tail, most_misses, needed, pmf, upper_bound
from kvobs.slo.calibration._exact import fisher_greater, fisher_two_sided, kolmogorov_smirnov
from kvobs.slo.calibration._threshold import Ordered, plug_in, ranks
from kvobs.slo.calibration._windows import wider

SHARES = st.sampled_from(["1/20", "1/100", "1/3", "1/2", "9/10", "1/1000"]).map(Fraction)
LEVELS = st.sampled_from([0.01, 0.05, 0.1, 0.3, 0.9])


def exactly(k: int, n: int, p: Fraction) -> Fraction:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@given(st.integers(1, 300), st.data(), SHARES)
def test_binomial_tails_are_those_of_fractions(n: int, data: st.DataObject, share: Fraction) -> None:
    """Single probabilities and lower tails agree with sums of exact fractions to a relative 1e-12."""
    k = data.draw(st.integers(0, n))
    assert math.isclose(pmf(k, n, float(share)), float(exactly(k, n, share)), rel_tol=1e-12, abs_tol=1e-300)
    tail = float(sum(exactly(i, n, share) for i in range(k + 1)))
    assert math.isclose(lower_tail(k, n, float(share)), tail, rel_tol=1e-12, abs_tol=1e-300)


@given(st.integers(1, 5_000), st.data(), LEVELS, LEVELS)
def test_the_bound_and_the_test_are_one(n: int, data: st.DataObject, alpha: float, delta: float) -> None:
    """The Clopper-Pearson bound solves its equation, and is at most alpha just where the test rejects."""
    k = data.draw(st.integers(0, n - 1))
    bound = upper_bound(k, n, delta)
    assert math.isclose(lower_tail(k, n, bound), delta, rel_tol=1e-6)
    tail = lower_tail(k, n, alpha)
    if not math.isclose(tail, delta, rel_tol=1e-6):
        assert (bound <= alpha) == (tail <= delta)


@given(st.integers(0, 40), LEVELS, LEVELS)
def test_the_needed_number_is_the_least(k: int, alpha: float, delta: float) -> None:
    """With the needed number of samples k misses reject, with one fewer they do not; one more miss never does."""
    n = needed(k, alpha, delta)
    assert lower_tail(k, n, alpha) <= delta < lower_tail(k, n - 1, alpha)
    assert most_misses(n, alpha, delta) == k
    assert most_misses(n - 1, alpha, delta) == k - 1


@given(st.integers(0, 3_000), LEVELS, LEVELS)
def test_ranks_begin_where_a_rejection_is_possible(windows: int, alpha: float, delta: float) -> None:
    """Tested ranks rise, end at all windows, are few, and none is below the least number of samples."""
    found = ranks(windows, alpha, delta)
    assert bool(found) == (windows >= needed(0, alpha, delta))
    if found:
        assert found[0] >= needed(0, alpha, delta)
        assert found[-1] == windows
        assert len(found) <= 201
        assert list(found) == sorted(set(found))


@given(st.integers(1, 14), st.integers(1, 14), st.data())
def test_fisher_is_enumeration(n: int, m: int, data: st.DataObject) -> None:
    """Both forms of Fisher's test equal sums of exact hypergeometric probabilities over all tables."""
    a, b = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    chances = {x: Fraction(math.comb(n, x) * math.comb(m, a + b - x), math.comb(n + m, a + b))
               for x in range(max(0, a + b - m), min(n, a + b) + 1)}
    two_sided = sum(chance for chance in chances.values() if chance <= chances[a])
    assert math.isclose(fisher_two_sided((a, b), (n, m)), float(two_sided), rel_tol=1e-9)
    greater = sum(chance for x, chance in chances.items() if x >= a)
    assert math.isclose(fisher_greater(a, n, a + b, n + m), float(greater), rel_tol=1e-9)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_kolmogorov_smirnov_is_enumeration(n: int, m: int, data: st.DataObject) -> None:
    """Without ties the exact p-value is the share of all divisions of the values with as large a distance."""
    values = data.draw(st.permutations(range(n + m)))

    def distance(first: tuple[int, ...]) -> Fraction:
        rest = [value for value in range(n + m) if value not in first]
        return max(abs(Fraction(sum(v <= x for v in first), n) - Fraction(sum(v <= x for v in rest), m))
                   for x in range(n + m))

    seen = distance(tuple(values[:n]))
    divisions = [distance(division) for division in itertools.combinations(range(n + m), n)]
    found = kolmogorov_smirnov(values[:n], values[n:])
    assert found.exact
    assert math.isclose(found.distance, float(seen), rel_tol=1e-12)
    assert math.isclose(found.p_value, sum(one >= seen for one in divisions) / len(divisions), rel_tol=1e-9)


NUMBERS = st.none() | st.floats(-100, 100) | st.just(math.nan)
ROWS = st.lists(st.tuples(st.integers(0, 60), NUMBERS, NUMBERS, st.integers(0, 2)), max_size=60)


@given(ROWS, st.sampled_from([1.0, 2.5, 10.0]), st.integers(2, 5))
def test_windows_hold_maxima(rows: list[tuple[int, float | None, float | None, int]], width: float,
                             factor: int) -> None:
    """Each window is the maximum of what falls into it, counted where one of two is lacking; merging is rewindowing."""
    ordered = [Sample(float(t), *rest) for t, *rest in sorted(rows, key=lambda row: (row[3], row[0]))]
    found = in_windows(ordered, width)
    groups: dict[tuple[int, int], list[Sample]] = {}
    for one in ordered:
        groups.setdefault((math.floor(one.t_s / width), one.source), []).append(one)
    there = {key: [[value for value in (one[at] for one in group) if value is not None and value == value]
                   for at in (1, 2)] for key, group in groups.items()}
    whole = {key: (max(signals), max(latencies)) for key, (signals, latencies) in there.items()
             if signals and latencies}
    assert list(zip(found.slots, found.sources, zip(found.signals, found.latencies, strict=True), strict=True)) == [
        (*key, whole[key]) for key in sorted(whole)]
    assert found.incomplete == len(groups) - len(whole)
    assert found.absent == sum(any(value is None or value != value for value in one[1:3]) for one in ordered)
    merged = in_windows([one for one in ordered if (math.floor(one.t_s / width), one.source) in whole], width * factor)
    again = wider(found, factor)
    assert (list(again.signals), list(again.latencies)) == (list(merged.signals), list(merged.latencies))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=50), st.integers(-1, 6))
def test_a_threshold_counts_what_is_at_or_below_it(pairs: list[tuple[int, bool]], threshold: int) -> None:
    """A threshold's windows are those with a signal at most it, ties too; the plug-in is the last that keeps 25 %."""
    ordered = Ordered([float(signal) for signal, _ in pairs], [missed for _, missed in pairs])
    below = [missed for signal, missed in pairs if signal <= threshold]
    assert ordered.at(threshold)[1:] == (len(below), sum(below))
    kept = [value for value in {signal for signal, _ in pairs}
            if sum(missed for signal, missed in pairs if signal <= value) * 4 <= sum(one <= value for one, _ in pairs)]
    found = plug_in(ordered, 0.25)
    assert (found and found.threshold) == (max(kept) if kept else None)


CELLS = st.text(st.sampled_from('0123456789.-+einfa",\n\r _x\x00\u0661'), max_size=8)


@given(st.lists(st.lists(CELLS, max_size=4).map(",".join), max_size=6), st.booleans())
def test_any_text_is_read_or_refused(lines: list[str], headed: bool) -> None:
    """Whatever the text, it becomes finite signals and latencies at or above zero in order of time, or one clause."""
    text = [*(["t,load,took_ms"] if headed else []), *lines]
    try:
        found = list(read_csv([line + "\n" for line in text], "load", "took_ms"))
    except Unreadable as refusal:
        assert str(refusal)
        return
    assert all(one.signal is None or math.isfinite(one.signal) for one in found)
    assert all(one.latency_s is None or one.latency_s >= 0 for one in found)
    assert [one.t_s for one in found] == sorted(one.t_s for one in found)


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(0, 1e9)), max_size=20))
def test_numbers_come_back_from_csv(rows: list[tuple[float, float]]) -> None:
    """Every number is read exactly; without a column t rows are one second apart."""
    text = ["took,load\n", *(f"{took!r},{load!r}\n" for load, took in rows)]
    assert list(read_csv(text, "load", "took")) == [Sample(float(at), *row) for at, row in enumerate(rows)]


def test_tails_of_a_million_samples() -> None:
    """Up to a million samples tails and bounds agree with scipy's to a relative 1e-9."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed.")
    for n, k, p in ((10**6, 49_500, 0.05), (10**6, 50_300, 0.05), (10**6, 10, 1e-5), (123_457, 61_000, 0.5)):
        assert math.isclose(lower_tail(k, n, p), stats.binom.cdf(k, n, p), rel_tol=1e-9)
    for n, k, delta in ((10**6, 49_500, 0.1), (10**5, 0, 1e-6), (77_806, 3_006, 0.9), (7, 6, 0.05),
                        (10**6, 999_000, 0.05)):
        assert math.isclose(upper_bound(k, n, delta), stats.beta.isf(delta, k + 1, n - k), rel_tol=1e-9)


def test_two_sample_tests_of_many_samples() -> None:
    """With hundreds and thousands of samples both exact tests and the limit law agree with scipy's."""
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed.")
    for a, b, n, m in ((3, 12, 500, 500), (100, 140, 5_000, 4_000), (0, 9, 70_000, 70_001)):
        known = stats.fisher_exact([[a, n - a], [b, m - b]]).pvalue
        assert math.isclose(fisher_two_sided((a, b), (n, m)), known, rel_tol=1e-6)
        known = stats.fisher_exact([[a, n - a], [b, m - b]], alternative="greater").pvalue
        assert math.isclose(fisher_greater(a, n, a + b, n + m), known, rel_tol=1e-6)
    first = [(37 * i % 1009) / 1009 for i in range(1_009)]
    for size, shift, mode in ((900, 0.03, "exact"), (400, 0.1, "exact"), (5_000, 0.05, "asymp"),
                              (5_000, 0.0005, "asymp")):
        second = [min(i / size + shift, 1 + shift) for i in range(size)]
        found, known = kolmogorov_smirnov(first, second), stats.ks_2samp(first, second, method=mode)
        assert found.exact == (mode == "exact")
        assert math.isclose(found.distance, known.statistic, rel_tol=1e-9)
        limit = stats.kstwobign.sf(found.distance * math.sqrt(1_009 * size / (1_009 + size)))
        assert math.isclose(found.p_value, known.pvalue if mode == "exact" else limit, rel_tol=1e-6)
