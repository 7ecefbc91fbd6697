"""Every kind of file that is fuzzed: what it begins with, how it is damaged, and who reads it."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvobs.allocator.readers import _formats
from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.recording import Recording
from tests.fuzz import documents
from tests.fuzz.mutations import Mutation, damaged_bytes, damaged_opcodes, damaged_values
from tests.profiles import call_event, memory_event, trace, write_nsys

FOUND = Path(__file__).resolve().parent / "found"  # every input that once failed


@dataclass(frozen=True)
class Format:
    """``read`` gets the bytes and the path of a scratch file that it may fill."""

    name: str
    seeds: Sequence[bytes]
    mutations: Sequence[Mutation]
    read: Callable[[bytes, str], Recording] = lambda data, scratch: _formats.parse(data, "fuzz")


def _packed(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Valid gzip around damaged content, or damaged gzip."""
    inner = damaged_bytes(rng, gzip.decompress(data), other) if rng.random() < 0.7 else gzip.decompress(data)
    packed = gzip.compress(inner, 1, mtime=0)
    return packed if rng.random() < 0.7 else damaged_bytes(rng, packed, other)


def _documents() -> list[Any]:
    return [documents.modern(), documents.modern(pool_of_events=False), documents.of_2023(), documents.segments()]


def _profiles() -> list[bytes]:
    failed = memory_event(2, 1, 99, 1, 2) | {"name": "[OutOfMemory]"}
    events = [memory_event(1.5, 4096, 512, 512, 1024), memory_event(2, 4096, -512, 0, 1024),
              memory_event(3, 4096, 5, 5, 0, 0, -1), call_event(4, 5.25, "cudaMalloc"), call_event(8, 1, "cudaFree"),
              failed]
    rows = [[-1, 1, 512, 7], [10 ** 18, 2, 99, 0], [10 ** 18 + 5000, 3, -99, 0], [10 ** 18 + 5000, 4, 99, 1]]
    return [_json(trace(events, 10 ** 18)), _json(events), _json(rows), _json([[1, 2], [[0] * 9, list(range(9))]])]


def _export() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        calls = [(5, 9, "cudaMalloc_v3020", 3), (12, 13, "cuMemMap", 3)]
        usage = [(5, 3, 0, 1 << 20, 2, 0), (7, 3, 0, 1 << 20, 2, 1), (7, 3, 1, 9, 1, 0)]
        return write_nsys(Path(folder) / "export.sqlite", calls, usage, 10 ** 18).read_bytes()


def _from_file(data: bytes, scratch: str) -> Recording:
    Path(scratch).write_bytes(data)
    return _formats.parse(data, "fuzz", path=scratch)


def both_ways(data: bytes, scratch: str) -> Recording:
    """The short way through a pickle, which only large files take otherwise; it must agree with the whole way."""
    short = _formats.condensed(data, "fuzz")
    try:
        whole = _formats.whole(data, "fuzz")
    except Refused:
        assert short is None, "What the whole way refuses, the short way reads."
        raise
    assert short is None or told(short) == told(whole), "The short and the whole way differ."
    return whole


def told(recording: Recording) -> list[Any]:
    """Everything in a recording, with stacks and pools instead of their numbers."""
    stacks, pools = recording.stacks, recording.pools
    return [recording.schema, recording.settings, recording.notes, [
        (device.device, device.annotations, list(zip(
            device.events.action, device.events.address, device.events.size, device.events.stream,
            device.events.time_us, [pools[pool] if pool >= 0 else None for pool in device.events.pool],
            map(stacks.of, device.events.stack), strict=True)),
         [(segment[:3], pools[segment.pool], segment.small, segment.expandable, stacks.of(segment.stack),
           [(block[:4], stacks.of(block.stack)) for block in segment.blocks]) for segment in device.state])
        for device in recording.devices]]


def _json(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


_SMALL = (2, 4, 8, 9, 10, 14, 15, 16, 24)  # histories of a few kilobytes
_PICKLES = [pickle.dumps(document, protocol) for protocol in (2, 4) for document in _documents()]
_TEXTS = [_json(document) for document in _documents()]
_PROFILES = _profiles()
FORMATS = (
    Format("pickle", _PICKLES, (damaged_opcodes, damaged_opcodes, damaged_bytes, damaged_values(pickle.dumps))),
    Format("condensed", [pickle.dumps(documents.history(seed), protocol) for seed in _SMALL for protocol in (4, 5)],
           (damaged_opcodes, damaged_bytes, damaged_values(pickle.dumps)), both_ways),
    Format("json", _TEXTS, (damaged_bytes, damaged_values(_json))),
    Format("gz", [gzip.compress(data, mtime=0) for data in (_PICKLES[4], _TEXTS[2])], (_packed,)),
    Format("kineto", _PROFILES[:2], (damaged_bytes, damaged_values(_json))),
    Format("timeline", _PROFILES[2:], (damaged_bytes, damaged_values(_json))),
    Format("nsys", [_export()], (damaged_bytes,), _from_file),
)


def by_name(name: str) -> Format:
    """One format."""
    return next(found for found in FORMATS if found.name == name)


def damaged(kind: Format, number: int) -> bytes:
    """The input of a number: the same in every run."""
    rng = random.Random(number)
    data, other = rng.choice(kind.seeds), rng.choice(kind.seeds)
    return rng.choice(kind.mutations)(rng, data, other)
