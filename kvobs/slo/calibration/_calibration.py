"""The whole answer: threshold or abstention, drift, what is left of autocorrelation, other methods' choices."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvobs.config import duration_text
from kvobs.slo.calibration import _threshold
from kvobs.slo.calibration._binomial import lower_tail, needed, upper_bound
from kvobs.slo.calibration._exact import fisher_two_sided, kolmogorov_smirnov
from kvobs.slo.calibration._threshold import Ordered, Point
from kvobs.slo.calibration._windows import Neighbours, Windows, neighbours, wider

NOTEWORTHY = 0.01  # p-values below it are told as a drift, or as misses that follow each other


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Which signal is to keep which latency, in at least the share ``quantile`` of windows, within the SLO."""

    signal: str
    latency: str
    slo_ns: int
    quantile: float
    delta: float
    window_ns: int

    @property
    def alpha(self) -> float:
        """The share of windows that may miss."""
        return round(1 - self.quantile, 12)


class Tested(msgspec.Struct, frozen=True):
    """A threshold of the grid: what the data say, the exact upper bound on its rate, and whether it was accepted."""

    threshold: float
    windows: int
    misses: int
    rate: float
    upper_bound: float
    p_value: float
    accepted: bool


class Choice(msgspec.Struct, frozen=True):
    """What a method would choose, and what the data show for it; None where it chooses nothing or nothing is shown."""

    method: str
    threshold: float | None
    windows: int | None
    misses: int | None
    rate: float | None
    note: str


class Drift(msgspec.Struct, frozen=True):
    """The first half of the windows against the second, in time: misses and the signal's distribution."""

    first_windows: int
    first_misses: int
    second_windows: int
    second_misses: int
    misses_p_value: float
    signal_distance: float
    signal_p_value: float
    signal_exact: bool
    found: bool
    sentence: str


class Resemblance(msgspec.Struct, frozen=True):
    """How much misses of neighbouring windows resemble each other, and how wide windows would have to be."""

    pairs: int
    correlation: float | None
    p_value: float
    grow: bool
    enough_s: float | None
    sentence: str


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """``threshold`` is None where it abstains; then ``more_windows`` says how many without a miss might do."""

    question: Question
    samples: int
    absent: int
    incomplete: int
    windows: int
    misses: int
    threshold: float | None
    sentence: str
    more_windows: int | None
    drift: Drift | None
    neighbours: Resemblance
    choices: tuple[Choice, ...]
    tested: tuple[Tested, ...]


def calibrate(windows: Windows, question: Question) -> Calibration:
    """Answer a question from windows."""
    alpha, delta, limit_s = question.alpha, question.delta, question.slo_ns / 1e9
    missed = windows.misses(limit_s)
    ordered = Ordered(windows.signals, missed)
    points = _threshold.grid(ordered, alpha, delta)
    found = _threshold.learn_then_test(points, alpha, delta)
    sentence, more = (_abstains(ordered, points, question) if found is None
                      else (_promises(found, ordered, question), None))
    return Calibration(
        question=question, samples=windows.samples, absent=windows.absent, incomplete=windows.incomplete,
        windows=len(windows), misses=sum(missed), threshold=None if found is None else found.threshold,
        sentence=sentence, more_windows=more, drift=_drift(windows.signals, missed),
        neighbours=_resemblance(windows, limit_s, needed(0, alpha, delta)),
        choices=_choices(ordered, points, found, alpha, delta),
        tested=tuple(Tested(*point, point.misses / point.windows, upper_bound(point.misses, point.windows, delta),
                            lower_tail(point.misses, point.windows, alpha),
                            found is not None and point.threshold <= found.threshold) for point in points))


def share_text(value: float) -> str:
    """A share as a text: ``5 %``, ``0.123 %``."""
    return f"{value * 100:.3g} %"


def _p_text(value: float) -> str:
    return "p < 1e-9" if value < 1e-9 else f"p = {value:.2g}"


def _promises(found: Point, ordered: Ordered, question: Question) -> str:
    bound = share_text(upper_bound(found.misses, found.windows, question.delta))
    last = found.threshold == ordered.signals[-1]
    return (f"With confidence {share_text(1 - question.delta)}, at most {share_text(question.alpha)} of windows of "
            f"{duration_text(question.window_ns)} whose {question.signal} is at most {found.threshold:g} have a "
            f"{question.latency} above {duration_text(question.slo_ns)}: {found.misses} of {found.windows} had (at "
            f"most {bound} by the exact bound for this threshold alone)."
            + " It is the highest value that was seen; nothing is known beyond it." * last)


def _abstains(ordered: Ordered, points: Sequence[Point], question: Question) -> tuple[str, int]:
    if not points:
        whole = ordered.at(ordered.signals[-1]) if len(ordered) else Point(0.0, 0, 0)
        more = needed(whole.misses, question.alpha, question.delta) - whole.windows
        least = needed(0, question.alpha, question.delta)
        return (f"No threshold is given: {_count(whole.windows, 'window')} are fewer than the least number, {least}; "
                f"with the {_count(whole.misses, 'miss', 'es')} among them, {more} more without a miss would be "
                "needed."), more
    first, whole = points[0], points[-1]
    more = needed(first.misses, question.alpha, question.delta) - first.windows
    sentence = (f"No threshold is given: already of the {first.windows} windows with the lowest {question.signal} (at "
                f"most {first.threshold:g}) {first.misses} missed, which does not exclude a rate above "
                f"{share_text(question.alpha)}; at least {more} more of them without a further miss would be needed.")
    if first.misses * whole.windows > whole.misses * first.windows:
        sentence += (f" Misses are rarer at high values of {question.signal}: if its low values are the bad ones, "
                     "calibrate its negative.")
    return sentence, more


def _count(number: int, what: str, many: str = "s") -> str:
    return f"{number} {what}{many * (number != 1)}"


def _drift(signals: Sequence[float], missed: Sequence[bool]) -> Drift | None:
    half, count = len(signals) // 2, len(signals)
    if not half:
        return None
    first, second = sum(missed[:half]), sum(missed[half:])
    misses_p = fisher_two_sided((first, second), (half, count - half))
    distance, signal_p, exact = kolmogorov_smirnov(signals[:half], signals[half:])
    found = min(misses_p, signal_p) < NOTEWORTHY
    sentence = (f"From the first half to the second, misses went from {share_text(first / half)} to "
                f"{share_text(second / (count - half))} (Fisher's exact test, {_p_text(misses_p)}) and the signal's "
                f"distribution by {distance:.3g} (Kolmogorov-Smirnov, {_p_text(signal_p)}): "
                + ("a drift, so that a threshold from these data may not hold for what comes." if found
                   else "no drift is seen."))
    return Drift(half, first, count - half, second, misses_p, distance, signal_p, exact, found, sentence)


def _resemblance(windows: Windows, limit_s: float, least: int) -> Resemblance:
    left = neighbours(windows, limit_s)
    if left.correlation is None:
        return Resemblance(*left, False, None, "The autocorrelation of misses cannot be told: of the windows that "
                                               "follow each other, none or all missed.")
    said = (f"Misses of neighbouring windows have a lag-1 autocorrelation of {left.correlation:.2f} (Fisher's exact "
            f"test, {_p_text(left.p_value)})")
    if not _clings(left):
        return Resemblance(*left, False, None, f"{said}: the windows are wide enough.")
    factor, merged = 2, wider(windows, 2)
    while len(merged) >= least:
        if not _clings(neighbours(merged, limit_s)):
            enough_s = merged.width_s
            return Resemblance(*left, True, enough_s, f"{said}: wider windows are needed, else the confidence is not "
                               f"what it says; {enough_s:g} s would be enough here.")
        factor *= 2
        merged = wider(windows, factor)
    return Resemblance(*left, True, None, f"{said}: wider windows are needed, else the confidence is not what it "
                                          "says, and there are too few data to say how wide.")


def _clings(left: Neighbours) -> bool:
    return left.correlation is not None and left.p_value < NOTEWORTHY


def _choices(ordered: Ordered, points: Sequence[Point], found: Point | None, alpha: float,
             delta: float) -> tuple[Choice, ...]:
    article = ordered.at(_threshold.ARTICLE_THRESHOLD)
    above = _threshold.article_share_above()
    return (
        _choice("Learn-then-Test", found, "exact binomial bounds, thresholds tested from the lowest up"),
        _choice("plug-in quantile", _threshold.plug_in(ordered, alpha),
                "the observed rate taken for the true one: too high about half the time"),
        _choice("DKW bound", _threshold.dkw(points, alpha, delta), "as valid, and wasteful where misses are rare"),
        _choice("article's log-normal", article,
                f"{_threshold.ARTICLE_THRESHOLD} for any data, called its 95 % point: for LogNormal"
                f"({_threshold.ARTICLE_MU}, {_threshold.ARTICLE_SIGMA}), P(F >= {_threshold.ARTICLE_THRESHOLD}) is "
                f"{above:.3f}"),
    )


def _choice(method: str, point: Point | None, note: str) -> Choice:
    if point is None:
        return Choice(method, None, None, None, None, note)
    return Choice(method, *point, point.rate, note)
