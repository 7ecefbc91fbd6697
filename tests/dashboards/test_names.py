"""What the tests with real processes take of the boards, without any process."""

from __future__ import annotations

import pytest

from tests.dashboards.boards import named, rate_interval, replaced, step
from tests.dashboards.explanations import EXPLAINED


@pytest.mark.parametrize("scenario", EXPLAINED)
def test_every_panel_that_explains_is_on_its_board(scenario: str) -> None:
    """Each panel that an explanation names is one query of that board."""
    for says in EXPLAINED[scenario]:
        assert named(says.board, says.panel, says.ref).expr


def test_variables_are_replaced_as_in_grafana() -> None:
    """The interval of rates is four scrapes, or a step and a scrape where that is longer; unknown variables raise."""
    assert [step(6 * 3600, 120, 15), step(6 * 3600, 600, 15), step(600, 600, 15)] == [120, 30, 15]
    assert [rate_interval(1, 15), rate_interval(60, 15), rate_interval(15, 15)] == [60, 75, 60]
    assert replaced('rate(x{job=~"$job", instance=~"${instance:regex}"}[$__rate_interval])', instances="a|b",
                    step_s=60, scrape_s=15) == 'rate(x{job=~"kvobs", instance=~"a|b"}[75s])'
    with pytest.raises(KeyError, match="no variable 'nobody'"):
        replaced("x[$nobody]")
