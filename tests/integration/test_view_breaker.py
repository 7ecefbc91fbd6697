"""The page Breaker in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed: pip install 'kvobs[app]'")
pytest.importorskip("altair", reason="streamlit is not installed: pip install 'kvobs[app]'")

from tests.browser import browsing, viewing
from tests.support import wait_until
from tests.unit.test_view_breaker import write

pytestmark = [pytest.mark.slow, pytest.mark.peer]


@pytest.mark.parametrize("dark", [False, True])
def test_levels_are_drawn_and_a_replay_is_a_row_of_its_own(tmp_path: Path, dark: bool) -> None:
    """Both devices have a row; a replay adds a third, and no row is squeezed; nothing fails and nothing is asked of
    another machine.
    """
    write(tmp_path)
    with viewing(tmp_path) as address, browsing(dark=dark, width=1280) as window:
        window.page.goto(address)
        window.open("Breaker")
        wait_until(lambda: window.figure("actions").startswith(f"{5 << 20:,} B"), 60, "the strip")
        drawn = window.page.locator("[data-testid=stVegaLiteChart]")
        drawn.first.wait_for(timeout=30_000)
        window.page.get_by_role("button", name="Replay", exact=True).click()
        wait_until(lambda: drawn.count() == 2, 60, "the replay")
        drawn.nth(1).scroll_into_view_if_needed()
        for number, rows in enumerate((2, 3)):
            box = drawn.nth(number).bounding_box()
            assert box is not None
            assert box["height"] >= 30 * rows + 130  # the axis and the legend take so much
        assert window.page.get_by_text("Modelled: default would have made").count() == 1
        assert not window.errors
        assert all(url.startswith((address, "data:", "blob:", address.replace("http", "ws"))) for url in window.asked)
