"""The formulas, against figures worked out by hand."""

from __future__ import annotations

import pytest

from kvobs.analysis import (
    article_fragmentation_rate,
    chance_share,
    corrected,
    unused_share,
    write_amplification,
)


@pytest.mark.parametrize(("total", "largest", "rate"), [(1000, 250, 0.75), (1000, 1000, 0.0), (60, 1, 59 / 60)])
def test_the_article_s_rate(total: int, largest: int, rate: float) -> None:
    """(total - largest) / total."""
    assert article_fragmentation_rate(total, largest) == rate


def test_equal_buffers_alone_drive_the_article_s_rate_to_one() -> None:
    """n equal buffers, none wasted, have the rate 1 - 1/n: why nothing in kvobs decides on it."""
    for n in (1, 2, 60, 10_000):
        assert article_fragmentation_rate(n * 512, 512) == pytest.approx(1 - 1 / n)


@pytest.mark.parametrize(("written", "copied", "factor"), [(100, 0, 1.0), (100, 2800, 29.0), (3, 3, 2.0)])
def test_write_amplification(written: int, copied: int, factor: float) -> None:
    """(written + copied) / written."""
    assert write_amplification(written, copied) == factor


@pytest.mark.parametrize(("reserved", "allocated", "share"), [(1000, 250, 0.75), (1000, 1000, 0.0), (512, 0, 1.0)])
def test_unused_share(reserved: int, allocated: int, share: float) -> None:
    """(reserved - allocated) / reserved."""
    assert unused_share(reserved, allocated) == share


def test_nothing_has_no_ratio() -> None:
    """A ratio over nothing is absent, not 0."""
    assert article_fragmentation_rate(0, 0) is None
    assert write_amplification(0, 0) is None
    assert write_amplification(0, 64) is None
    assert unused_share(0, 0) is None


@pytest.mark.parametrize(("length", "window", "sinks"), [(1, 0, 0), (5, 2, 0), (40, 64, 0), (100, 7, 4), (5, 64, 4)])
def test_the_chance_line_is_what_counting_every_pair_gives(length: int, window: int, sinks: int) -> None:
    """Over each query's keys in view, one by one: the share that is near, and its mean over the queries."""
    shares = []
    for query in range(length):
        keys = [key for key in range(query + 1) if key >= sinks]
        if keys:
            shares.append(sum(query - key <= window for key in keys) / len(keys))
    assert chance_share(length, window, sinks) == pytest.approx(sum(shares) / len(shares))


def test_the_chance_line_of_512_tokens_is_the_article_s() -> None:
    """By harmonic numbers, (65 + 65 (H(512) - H(65))) / 512, which is 0.388."""
    harmonic = sum(1 / n for n in range(66, 513))
    assert chance_share(512, 64) == pytest.approx((65 + 65 * harmonic) / 512)
    assert round(chance_share(512, 64) or 0, 3) == 0.388


def test_the_chance_line_of_sinks_alone_is_absent() -> None:
    """Where no key is left there is no share."""
    assert chance_share(0, 64) is None
    assert chance_share(4, 64, sinks=4) is None
    assert chance_share(3, 64, sinks=4) is None


@pytest.mark.parametrize(("share", "chance", "value"), [
    (0.388, 0.388, 0.0), (1.0, 0.388, 1.0), (0.92, 0.388, 0.532 / 0.612), (0.0, 0.5, -1.0), (0.3, 0.0, 0.3)])
def test_correction_for_chance(share: float, chance: float, value: float) -> None:
    """Uniform attention has 0, attention that is all near has 1, less than chance is below 0."""
    assert corrected(share, chance) == pytest.approx(value)


def test_where_everything_is_near_there_is_no_corrected_share() -> None:
    """A cache no longer than the window has a chance of 1, against which nothing can be told."""
    assert corrected(1.0, 1.0) is None
