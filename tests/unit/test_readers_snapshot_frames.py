"""Pickle cuts a file into frames wherever 64 KiB are full, also within a pair of integers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.readers._pickle import load

FRAME = 0x95


def nothing(_: float) -> None:
    pass


def cuts_pair(data: bytes) -> bool:
    """Does the second frame begin with the second integer of a pair?"""
    at = 2 + 9 + int.from_bytes(data[3:11], "little")
    assert data[at] == FRAME
    return data[at + 9:at + 10] + data[at + 11:at + 12] == b"K\x86"


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_frame_may_begin_anywhere(protocol: int) -> None:
    """Whatever the boundary of two frames falls on, the file is read as pickle reads it; pairs are cut too."""
    cut = 0
    for padding in range(40):
        events: list[Any] = [{"pool_id": (number % 200, (number + 7) % 200), "size": number} for number in range(5_000)]
        data = pickle.dumps(["x" * padding, events], protocol=protocol)
        assert load(data, nothing) == pickle.loads(data)
        cut += cuts_pair(data)
    assert cut


@pytest.mark.parametrize("length", [1 << 17, 1 << 40, (1 << 64) - 1])
def test_a_frame_within_a_pair_cannot_ask_for_memory(length: int) -> None:
    """A frame there that says to be larger than pickle makes one is refused before pickle sees it."""
    data = b"\x80\x04K\x01\x95" + length.to_bytes(8, "little") + b"K\x02\x86."
    with pytest.raises(Refused):
        load(data, nothing)


@pytest.mark.parametrize("body", [b"K\x01\x95%bK\x02\x86K\x03\x86.", b"]\x95%bK\x02\x86.", b"K\x01N\x95%bK\x02\x86."])
def test_a_frame_makes_no_other_tuple_of_it(body: bytes) -> None:
    """Tuples of anything but two integers stay refused, with a frame between as without."""
    with pytest.raises(Refused, match="no pair of integers"):
        load(b"\x80\x04" + body % (4).to_bytes(8, "little"), nothing)
