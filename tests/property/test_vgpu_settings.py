"""Texts of allocator settings, as kvobs takes them apart, changes and puts them together again, beside its parser."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvobs.allocator.settings import INTERVALS, MIB, Settings, known
from kvobs.virtual import Unavailable
from kvobs.virtual._settings import merged, pairs

divisions = st.sampled_from((0, 1, 2, 8, 1024))
some_settings = st.builds(
    Settings, max_split_size=st.none() | st.integers(21, 5_000).map(MIB.__mul__),
    max_non_split_rounding=st.integers(21, 100).map(MIB.__mul__),
    roundup_power2_divisions=st.lists(divisions, min_size=INTERVALS, max_size=INTERVALS).map(tuple),
    garbage_collection_threshold=st.sampled_from((0.0, 0.25, 0.5)), expandable_segments=st.booleans(),
    large_segment_size=st.integers(21, 64).map(MIB.__mul__), memory_fraction=st.none() | st.sampled_from((0.25, 0.5)))


@given(before=some_settings, change=some_settings)
def test_a_change_wins_and_the_rest_stays(before: Settings, change: Settings) -> None:
    """Of each option the change's value holds where it has one, else the one before, whatever the spelling."""
    found, old, new = (pairs(text) for text in (merged(before.conf(), change.conf()), before.conf(), change.conf()))
    assert found == old | new
    assert known(merged(before.conf(), change.conf())) == known(",".join(
        f"{key}:{value}" for key, value in found.items()))
    assert known(merged(before.conf(), before.conf())) == known(before.conf())


@given(text=st.text(alphabet="ab_:,[]019 >\n", max_size=40))
def test_anything_else_is_refused_whole(text: str) -> None:
    """A text is taken apart without loss, but for spaces, or refused with a sentence."""
    try:
        found = pairs(text)
    except Unavailable as error:
        assert str(error).endswith(".")
    else:
        again = ",".join(f"{key}:{value}" for key, value in found.items())
        assert pairs(again) == found
        if len(found) == text.count(",") + 1 - sum(value.count(",") for value in found.values()):
            assert "".join(again.split()) == "".join(text.split())
