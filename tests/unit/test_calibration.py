"""Calibration's answers: thresholds worked out by hand, abstention, drift, neighbours, policy and page."""

from __future__ import annotations

import random
from collections.abc import Iterable
from html.parser import HTMLParser

import pytest

from kvobs.breaker import SIGNALS, parse_policy
from kvobs.slo.calibration import (
    Calibration,
    Question,
    Sample,
    Unreadable,
    breaker_name,
    calibrate,
    fragment,
    in_windows,
    latency_unit,
    page,
    read_csv,
)
from kvobs.slo.calibration import _csv as csv_module
from kvobs.slo.calibration._binomial import needed
from kvobs.slo.calibration._plot import ticks
from kvobs.slo.calibration._threshold import Point, dkw, learn_then_test

FAST, SLOW = 0.001, 0.013  # seconds, against an SLO of 12 ms


def answer(pairs: Iterable[tuple[float, bool]], **asked: object) -> Calibration:
    """What is answered of windows of one second, one pair each."""
    question = Question(**{"signal": "load", "latency": "took", "slo_ns": 12_000_000, "quantile": 0.95, "delta": 0.1,
                           "window_ns": 10**9} | asked)
    return calibrate(in_windows((Sample(float(at), signal, SLOW if missed else FAST)
                                 for at, (signal, missed) in enumerate(pairs)), 1.0), question)


def shuffled(pairs: list[tuple[float, bool]]) -> list[tuple[float, bool]]:
    random.Random(1).shuffle(pairs)
    return pairs


@pytest.mark.parametrize(("alpha", "delta", "least"), [(0.05, 0.05, 59), (0.05, 0.1, 45), (0.01, 0.05, 299),
                                                       (0.1, 0.1, 22)])
def test_the_least_number_of_samples(alpha: float, delta: float, least: int) -> None:
    """Without a miss the least number is the closed form (1 - alpha)^n <= delta."""
    assert needed(0, alpha, delta) == least
    assert (1 - alpha) ** least <= delta < (1 - alpha) ** (least - 1)


def test_a_sequence_ends_at_the_first_that_is_not_rejected() -> None:
    """Of four thresholds the one before the first failure is chosen, though a later one would be rejected again."""
    tested = [Point(0.1, 59, 0), Point(0.2, 100, 1), Point(0.3, 120, 6), Point(0.4, 400, 6)]
    assert learn_then_test(tested, 0.05, 0.05) == tested[1]
    assert learn_then_test(tested[2:], 0.05, 0.05) is None
    assert learn_then_test([], 0.05, 0.05) is None


def test_the_dkw_bound_needs_more() -> None:
    """At alpha 0.05 and delta 0.1 a threshold without a miss needs ln(10) / (2 * 0.05^2) = 461 windows."""
    assert dkw([Point(0.1, 460, 0)], 0.05, 0.1) is None
    assert dkw([Point(0.1, 461, 0)], 0.05, 0.1) == Point(0.1, 461, 0)
    assert dkw([Point(0.1, 461, 0), Point(0.2, 600, 6)], 0.05, 0.1) == Point(0.1, 461, 0)


def test_a_jump_of_misses_is_found() -> None:
    """Where every window above 0.6 misses and none below, the threshold lies below 0.6 plus what 5 % allow."""
    found = answer(shuffled([(index / 1_000, index > 600) for index in range(1_000)]))
    assert found.threshold is not None
    assert 0.6 <= found.threshold < 0.6 / 0.95
    assert found.more_windows is None
    assert (found.windows, found.misses, found.absent, found.incomplete) == (1_000, 399, 0, 0)
    chosen, plug, _, article = found.choices
    assert chosen.threshold == found.threshold
    assert plug.threshold == 0.631  # 31 / 632 <= 0.05 < 32 / 633
    assert (article.threshold, article.windows, article.misses) == (0.683, 684, 83)
    assert "0.490" in article.note


def test_without_misses_all_is_accepted_and_said() -> None:
    """A threshold at the highest value seen says that nothing is known beyond it."""
    found = answer([(index % 7 / 7, False) for index in range(100)])
    assert found.threshold == pytest.approx(6 / 7)
    assert found.sentence.endswith("It is the highest value that was seen; nothing is known beyond it.")


@pytest.mark.parametrize(("windows", "misses", "delta", "more"), [(44, 0, 0.1, 1), (58, 0, 0.05, 1), (10, 0, 0.1, 35),
                                                                   (0, 0, 0.05, 59), (30, 1, 0.05, 63)])
def test_too_few_windows_abstain(windows: int, misses: int, delta: float, more: int) -> None:
    """Below the least number there is no threshold, and it is said how many more without a miss would do."""
    pairs = [(index / 100, index < misses) for index in range(windows)]
    found = answer(pairs, delta=delta)
    assert (found.threshold, found.more_windows, found.tested) == (None, more, ())
    assert f"{more} more without a miss" in found.sentence
    enough = answer(pairs + [(0.99, False)] * more, delta=delta)
    assert enough.threshold == 0.99


def test_what_is_never_rejected_abstains() -> None:
    """With misses everywhere the lowest threshold fails: said are what it would need, and a wrong direction."""
    found = answer(shuffled([(index / 400, index % 5 == 0 or index < 100) for index in range(400)]))
    first = found.tested[0]
    assert found.threshold is None
    assert found.more_windows == needed(first.misses, 0.05, 0.1) - first.windows
    assert not any(one.accepted for one in found.tested)
    assert "calibrate its negative" in found.sentence
    even = answer([(index % 40 / 40, index // 40 % 2 == 0) for index in range(400)])
    assert even.threshold is None
    assert "negative" not in even.sentence


def test_drift_is_told() -> None:
    """Misses that only the second half has, or a signal that moves, are a drift; the same in both halves is none."""
    steady = [(index * 37 % 101 / 101, index % 50 == 0) for index in range(1_000)]
    calm = answer(steady)
    assert calm.drift is not None
    assert not calm.drift.found
    later = answer([(signal, index > 500 and index % 20 == 0) for index, (signal, _) in enumerate(steady)])
    assert later.drift is not None
    assert later.drift.found
    assert later.drift.misses_p_value < 0.01 <= later.drift.signal_p_value
    moved = answer([(signal + (index >= 500), missed) for index, (signal, missed) in enumerate(steady)])
    assert moved.drift is not None
    assert (moved.drift.found, moved.drift.signal_distance) == (True, 1.0)
    assert "a drift" in moved.drift.sentence


def test_misses_that_cling_together_ask_for_wider_windows() -> None:
    """Bursts of five windows are told with a width that would separate them; misses at random are not."""
    numbers = random.Random(3)
    bursts = {index + more for index in range(0, 4_000, 5) if numbers.random() < 0.05 for more in range(5)}
    clinging = answer([(numbers.random(), index in bursts) for index in range(4_000)]).neighbours
    assert clinging.correlation == pytest.approx(0.8, abs=0.1)  # four of five misses are followed by one
    assert clinging.grow
    assert clinging.enough_s is not None
    assert clinging.enough_s >= 8
    alone = answer([(numbers.random(), numbers.random() < 0.05) for _ in range(4_000)]).neighbours
    assert not alone.grow
    assert answer([(0.5, False)] * 100).neighbours.correlation is None


@pytest.mark.parametrize(("signal", "name"), [
    ("cpu", "cpu"), ("kv_utilization", "kv_utilization"), ("app.queue", "app.queue"),
    ("Queue depth", "app.queue_depth"),
    ("kvobs.kv.fragmentation.article", "app.kvobs_kv_fragmentation_article"), ("9 lives", "app.signal_9_lives"),
    ("verdict", "app.verdict"), ("ÄÖ", "app.signal"), ("x" * 200, "app." + "x" * 63), ("", "app.signal")])
def test_the_fragment_is_a_policys_condition(signal: str, name: str) -> None:
    """Every fragment is parsed by the breaker as the condition above the very same threshold."""
    known = [one.name for one in SIGNALS.values() if not one.words]
    assert breaker_name(signal, known) == name
    for threshold in (0.1 + 0.2, 5.0, -3e-09, 1e300):
        line = fragment(name, threshold)
        level = f"[[level]]\nany = [{line}]\n"
        leaf, = parse_policy(f'name = "one"\n{level * 3}', "a test").levels[0].condition.conditions
        assert (leaf.signal, leaf.above) == (name, threshold)


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("windows", [20, 400])
def test_the_page_stands_alone(windows: int) -> None:
    """The page has no script and nothing from elsewhere, and shows names as text whatever they are."""
    found = answer(((index * 37 % 101 / 101, index % 97 == 0) for index in range(windows)), signal="<script>alert(1)")
    read = Elements()
    read.feed(page(found, ["A note & more."], "{ x }" if windows == 400 else ""))
    tags = {tag for tag, _ in read.seen}
    assert not tags & {"script", "img", "link", "iframe", "object"}
    assert not [attributes for _, attributes in read.seen if {"src", "href", "style", "onload"} & set(attributes)]
    assert ("svg" in tags, "pre" in tags) == (windows == 400, windows == 400)
    assert found.sentence in read.text
    assert "A note & more." in read.text


def test_the_plot_draws_the_numbers() -> None:
    """In the plot each tested threshold is a point of both lines, and their heights are proportional to the rates."""
    found = answer(shuffled([(index / 1_000, index > 600) for index in range(1_000)]))
    read = Elements()
    read.feed(page(found, [], ""))
    lines = {str(attributes["class"]): str(attributes["d"]) for tag, attributes in reversed(read.seen)
             if tag == "path"}  # the legend's come last
    rate = [tuple(map(float, pair.split())) for pair in lines["rate"][1:].split("L")]
    assert len(rate) == len(found.tested)
    limit = float(lines["limit"].split()[1].split("H")[0])
    floor = max(y for _, y in rate)  # a rate of 0
    assert found.tested[0].rate == 0
    for (_, y), one in zip(rate, found.tested, strict=True):
        assert (floor - y) / (floor - limit) == pytest.approx(one.rate / 0.05, abs=0.05)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.12, 0.1207), (-5, 9e6), (1e-9, 3e-9)])
def test_ticks_are_round_and_few(low: float, high: float) -> None:
    """Between 3 and 9 evenly spaced ticks lie within the range."""
    found = ticks(low, high)
    assert 3 <= len(found) <= 9
    assert low <= found[0] < found[-1] <= high


@pytest.mark.parametrize(("text", "why"), [
    ("", "it is empty"), ("t,took\n1,2\n", "there is no column 'load'; it has t, took"),
    ("load,load,took\n", "the column 'load' is there 2 times"), ("load,took\n1\n", "line 2 has 1 cells, the header 2"),
    ("load,took\n1,2\n\n1,fast\n", "line 4 has 'fast' under took, which is no number"),
    ("load,took\ninf,1\n", "line 2 has an infinite load"), ("load,took\n1,-1\n", "line 2 has a took below zero"),
    ("t,load,took\n5,1,1\n4,1,1\n", "line 3 has the time 4 after 5; rows must be in the order of t, in seconds"),
    ("t,load,took\n,1,1\n", "line 2 lacks a time; rows must be in the order of t, in seconds")])
def test_a_csv_is_refused_with_its_line(text: str, why: str) -> None:
    """What cannot be read is one clause that says where and why."""
    with pytest.raises(Unreadable) as refusal:
        list(read_csv(text.splitlines(keepends=True), "load", "took"))
    assert str(refusal.value).startswith(why)


def test_too_many_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row after the last allowed one is refused."""
    monkeypatch.setattr(csv_module, "MOST_ROWS", 3)
    assert len(list(read_csv(["load,took\n", *["1,1\n"] * 3], "load", "took"))) == 3
    with pytest.raises(Unreadable, match="it has more than 3 rows"):
        list(read_csv(["load,took\n", *["1,1\n"] * 4], "load", "took"))


def test_a_columns_name_says_its_unit() -> None:
    """A latency column's ending is its unit, without one it is seconds; a latency that never came is infinite."""
    assert [latency_unit(name)[0] for name in ("a_ms", "a_us", "a_ns", "a_s", "atoms", "ms")] == [
        1e3, 1e6, 1e9, 1, 1, 1e3]
    found, never = read_csv(["load,took_ms\n", "1,9\n", "1,inf\n"], "load", "took_ms")
    assert found.latency_s == 9_000_000 / 1e9  # to the last bit: at the SLO is within it
    assert never.latency_s == float("inf")
