"""The experiment with the breaker on vLLM: its sessions, its figures and how arms are compared, without vLLM."""

from __future__ import annotations

import math

import pytest

from kvobs.lab.breaker_vllm._client import Told
from kvobs.lab.breaker_vllm._figures import Run, compared, figures, student
from kvobs.lab.breaker_vllm._plan import ANSWER, LINE, sessions

NOTHING = {"preemptions": 0.0, "recomputed": 0.0, "transitions": 0.0, "generated": 0.0}


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042)])
def test_the_interval_is_students(freedom: int, quantile: float) -> None:
    """The quantile of Student's t is the one of the printed tables."""
    assert student(0.95, freedom) == pytest.approx(quantile, abs=6e-4)


def test_arms_are_compared_by_pairs() -> None:
    """Differences and ratios are taken within a seed: what changes both arms of a pair alike changes nothing."""
    runs = [Run(arm, seed, {"a": seed * 100.0 * scale + (2.0 if arm == "act" else 0.0), "b": seed * scale})
            for arm, scale in (("off", 1.0), ("act", 1.0)) for seed in (1, 2, 3)]
    added = compared(runs, "a", "off", "act", ratio=False)
    assert (added.effect, added.low, added.high, added.pairs) == (2.0, 2.0, 2.0, 3)
    doubled = [Run(run.arm, run.seed, {"b": run.figures["b"] * (2 if run.arm == "act" else 1)}) for run in runs]
    ratio = compared(doubled, "b", "off", "act", ratio=True)
    assert (ratio.effect, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_a_pair_without_a_ratio_is_left_out() -> None:
    """A pair in which a figure is 0 or endless has no ratio, and n says so."""
    runs = [Run(arm, seed, {"a": value}) for seed, pair in enumerate([(1.0, 3.0), (0.0, 1.0), (1.0, math.inf)])
            for arm, value in zip(("off", "act"), pair, strict=True)]
    found = compared(runs, "a", "off", "act", ratio=True)
    assert (found.pairs, found.effect) == (1, pytest.approx(3.0))
    assert math.isnan(found.low)


def test_goodput_counts_answers_that_began_in_time() -> None:
    """Tokens of answers that began within the objective are good; a turn that was refused for good is the last rank."""
    told = [Told("a", "normal", 1.0, 3.0, 0.5, 30, 30, 0), Told("b", "normal", 11.0, 12.0, 0.2, 50, 50, 1),
            Told("c", "sheddable", None, 9.0, 0.0, 0, 40, 8)]
    found = figures(told, 10.0, NOTHING, NOTHING | {"preemptions": 4.0}, objective_s=10.0)
    assert (found["goodput"], found["throughput"], found["refusals"], found["preemptions"]) == (3.0, 8.0, 9.0, 4.0)
    assert (found["ttft_p50"], found["ttft_p99"], found["gap_p99"]) == (11.0, math.inf, 0.5)


@pytest.mark.parametrize("lengths", [(), [(8_000, 900), (1, 1)]])
def test_sessions_are_those_of_their_seed(lengths: list[tuple[int, int]]) -> None:
    """The same seed gives the same sessions, another one others; lines and answers keep to their bounds."""
    found = sessions(20, 3, lengths)
    assert found == sessions(20, 3, lengths)
    assert found != sessions(20, 4, lengths)
    for session in found:
        for turn in session.turns:
            assert LINE[0] <= len(turn.line.split()) <= LINE[1]
            assert ANSWER[0] <= turn.answer <= ANSWER[1]
