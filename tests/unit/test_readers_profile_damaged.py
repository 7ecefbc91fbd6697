"""Profiler files with random damage: read, or refused in one sentence, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvobs.allocator.readers import _nsys, _profile_json
from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.recording import Recording
from tests.fuzz import formats

INPUTS = 3_000
WORDS = (b"-1", b"1e999", b"NaN", b"9223372036854775807", b"9" * 30, b"1" * 5000, b"null", b'"[memory]"', b"{", b"}",
         b"[", b"]", b'"', b"\\", b"\xff", b"\x00" * 4, b"[" * 2000, b'{"a":' * 2000, b"1.5", b'"dur": -1')


def seeds() -> dict[str, bytes]:
    kineto, raw, plot, export = (
        formats.by_name(name).seeds[index] for name, index in
        (("kineto", 0), ("timeline", 0), ("timeline", 1), ("nsys", 0)))
    return {"kineto": kineto, "broken kineto": kineto.replace(b'"cpu_instant', b'"cpu"_instant', 1), "raw": raw,
            "plot": plot, "nsys": export}


def damaged(whole: bytes, dice: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        place, kind = dice.randrange(len(data) + 1), dice.randrange(5)
        if kind == 0 and place < len(data):
            data[place] = dice.randrange(256)
        elif kind == 1:
            del data[place:place + dice.randrange(1, 40)]
        elif kind == 2:
            data[place:place + dice.randrange(8)] = dice.choice(WORDS)
        elif kind == 3:
            start = dice.randrange(len(whole))
            data[place:place + dice.randrange(60)] = whole[start:start + dice.randrange(1, 60)]
        elif dice.random() < 0.2:
            del data[place:]
    return bytes(data)


@pytest.mark.parametrize("kind", ["kineto", "broken kineto", "raw", "plot", "nsys"])
def test_damage_is_read_or_refused(kind: str) -> None:
    """Whatever bytes change, the reader gives columns of equal length, or refuses in one printable sentence."""
    parse: Callable[[bytes, str], Recording] = _nsys.parse if kind == "nsys" else _profile_json.parse
    whole, dice = seeds()[kind], random.Random(kind)
    parse(whole, "whole")
    read, refused = 0, []
    for _ in range(INPUTS):
        try:
            recording = parse(damaged(whole, dice), "damaged")
        except Refused as reason:
            refused.append(str(reason))
            continue
        read += 1
        calls = recording.calls
        assert len(calls.name) == len(calls.start_ns) == len(calls.duration_ns)
        for usage in recording.usage:
            columns = [usage.time_us, usage.allocated, usage.reserved, *usage.categories.values()]
            assert len({len(column) for column in columns}) == 1
    assert read > INPUTS // 100
    assert len(refused) > INPUTS // 100
    assert all(sentence.isprintable() and sentence.endswith(".") and len(sentence) < 600 for sentence in refused)
