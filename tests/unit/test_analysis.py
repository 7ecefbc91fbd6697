"""The formulas, against figures worked out by hand."""

from __future__ import annotations

import pytest

from kvobs.analysis import article_fragmentation_rate, unused_share, write_amplification


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
