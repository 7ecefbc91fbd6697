"""Profiler files with random damage: read, or refused in one sentence, and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvobs.allocator.readers import _nsys, _profile_json
from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.recording import Recording
from tests.profiles import call_event, memory_event, trace, write_nsys

INPUTS = 3_000
WORDS = (b"-1", b"1e999", b"NaN", b"9223372036854775807", b"9" * 30, b"1" * 5000, b"null", b'"[memory]"', b"{", b"}",
         b"[", b"]", b'"', b"\\", b"\xff", b"\x00" * 4, b"[" * 2000, b'{"a":' * 2000, b"1.5", b'"dur": -1')


def seeds(tmp_path: Path) -> dict[str, bytes]:
    failed = memory_event(2, 1, 99, 1, 2) | {"name": "[OutOfMemory]"}
    events = [memory_event(1.5, 4096, 512, 512, 1024), memory_event(2, 4096, -512, 0, 1024),
              memory_event(3, 4096, 5, 5, 0, 0, -1), call_event(4, 5.25, "cudaMalloc"),
              call_event(8, 1, "cudaFree"), failed]
    kineto = json.dumps(trace(events, 10 ** 18)).encode()
    rows = [[-1, 1, 512, 7], [10 ** 18, 2, 99, 0], [10 ** 18 + 5000, 3, -99, 0], [10 ** 18 + 5000, 3, 99, 1]]
    export = write_nsys(tmp_path / "e.sqlite", [(5, 9, "cudaMalloc_v3020", 3), (12, 13, "cuMemMap", 3)],
                        [(5, 3, 0, 1 << 20, 2, 0), (7, 3, 0, 1 << 20, 2, 1), (7, 3, 1, 9, 1, 0)], 10 ** 18)
    return {"kineto": kineto, "broken kineto": kineto.replace(b'"cpu_instant', b'"cpu"_instant', 1),
            "raw": json.dumps(rows).encode(), "plot": json.dumps([[1, 2], [[0] * 9, list(range(9))]]).encode(),
            "nsys": export.read_bytes()}


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
def test_damage_is_read_or_refused(tmp_path: Path, kind: str) -> None:
    """Whatever bytes change, the reader gives columns of equal length, or refuses in one printable sentence."""
    parse: Callable[[bytes, str], Recording] = _nsys.parse if kind == "nsys" else _profile_json.parse
    whole, dice = seeds(tmp_path)[kind], random.Random(kind)
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
