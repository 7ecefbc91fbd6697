"""The published definitions on states whose values were computed by hand."""

from __future__ import annotations

import pytest

from kvobs.allocator.definitions import Definition, Peaks, Wanted, definitions
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, State
from tests.states import segment

# 60 MiB reserved: 20 allocated, 4 pending, 36 free of which 16 (10 and 6) are split, the largest 20.
STATE: State = (
    segment(0, (10 * MIB, 0, INACTIVE), (4 * MIB, 4 * MIB, PENDING), (6 * MIB, 0, INACTIVE)),
    segment(32 * MIB, (20 * MIB, 0, INACTIVE)),
    segment(64 * MIB, (20 * MIB, 19 * MIB, ALLOCATED)))


def values(found: tuple[Definition, ...]) -> dict[str, float | None]:
    """Values by name."""
    return {one.name: one.value for one in found}


def test_every_formula_by_hand() -> None:
    """Each owner's formula gives the number that pencil and paper give."""
    found = values(definitions(STATE, Settings(), Peaks(reserved=80 * MIB, allocated=60 * MIB, active=68 * MIB),
                               Wanted(30 * MIB)))
    assert found == {
        "gmlake": pytest.approx(1 - 68 / 80), "stalloc": pytest.approx(60 / 80),
        "stormlog": pytest.approx(16 / 60), "pytorch_29554": pytest.approx(20 / 60), "vllm_37428": 40 * MIB,
        "largest_free": pytest.approx(1 - 20 / 36),
        # 36 MiB free in 3 blocks, 30 wanted: 1 - (1 + 36/30)/3.
        "extfrag": pytest.approx(1 - (1 + 36 / 30) / 3),
        # 30 pages of 2 MiB; pinned are those at 10 and 12 MiB, and the last ten.
        "kvcached": pytest.approx(12 / 30), "article": pytest.approx((20 - 20) / 20)}


def test_the_kernels_index_at_its_three_ends() -> None:
    """-1 where a block is enough, 0 where nothing is free, and near 1 for many small blocks that would do in sum."""
    def index(state: State, size: int) -> float | None:
        return values(definitions(state, Settings(), wanted=Wanted(size)))["extfrag"]

    scattered = tuple(segment(at * 32 * MIB, (2 * MIB, 2 * MIB, ALLOCATED), (2 * MIB, 0, INACTIVE)) for at in range(64))
    assert index(STATE, 20 * MIB) == -1
    assert index(STATE[2:], 20 * MIB) == 0
    assert index(scattered, 64 * MIB) == pytest.approx(1 - (1 + 128 / 64) / 64)
    assert index(STATE, MIB // 2) == 0  # small requests are served by small blocks, of which there are none


def test_what_cannot_be_told_has_a_reason_and_no_value() -> None:
    """Without history, request, or anything reserved, a definition is absent with a reason, never 0."""
    for one in definitions((), Settings()):
        assert (one.value is None) == bool(one.reason), one.name
    assert {one.name for one in definitions((), Settings()) if one.value is not None} == {"vllm_37428"}
    assert {one.name for one in definitions(STATE, Settings()) if one.value is None} == {"gmlake", "stalloc", "extfrag"}


def test_inactive_split_is_absent_under_expandable_segments() -> None:
    """PyTorch keeps no inactive_split for expandable segments, so the definition on it has no value."""
    state = (segment(0, (10 * MIB, 10 * MIB, ALLOCATED), (10 * MIB, 0, INACTIVE), expandable=True),)
    found = {one.name: one for one in definitions(state, Settings(expandable_segments=True))}
    assert found["stormlog"].value is None
    assert "expandable" in found["stormlog"].reason


def test_each_definition_says_whose_it_is_and_why_it_does_not_decide() -> None:
    """Names are unique; owner, formula and objection are there, the objection as one sentence."""
    found = definitions(STATE, Settings())
    assert len({one.name for one in found}) == len(found) == 9
    for one in found:
        assert one.owner
        assert one.formula
        assert one.objection.endswith(".")
        assert ". " not in one.objection
