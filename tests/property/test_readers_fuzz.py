"""Damaged and random files: read, or refused in one sentence, and what is read is what a plain second reading gives."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.allocator.readers import _formats, _pickle, _wire
from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.recording import ACTIONS, UNKNOWN
from tests.fuzz import formats, runner, worker

INPUTS = 20_000  # in all; scripts/fuzz_readers.py reads millions
EACH = -(-INPUTS // len(formats.FORMATS))
FOUND = sorted(formats.FOUND.glob("*.bin"))
FRAME = st.fixed_dictionaries({"name": st.text(max_size=5), "filename": st.text(max_size=5),
                               "line": st.integers(-1, 1 << 30)})
FRAMES = st.lists(FRAME, max_size=4)
SIZE = st.integers(0, 1 << 40)
STATE = st.sampled_from(["active_allocated", "active_pending_free", "inactive"])
BLOCK = st.fixed_dictionaries({"size": SIZE, "requested_size": SIZE, "state": STATE}, optional={"frames": FRAMES})
SEGMENT = st.fixed_dictionaries({
    "device": st.integers(0, 3), "address": st.integers(0, 1 << 48), "total_size": SIZE,
    "stream": st.integers(-(1 << 63), (1 << 63) - 1), "segment_type": st.sampled_from(["small", "large"]),
    "segment_pool_id": st.tuples(st.integers(0, 3), st.integers(0, 3)), "is_expandable": st.booleans(),
    "blocks": st.lists(BLOCK, max_size=4)})
EVENT = st.fixed_dictionaries(
    {"action": st.sampled_from([*ACTIONS, "new"]), "addr": st.integers(0, 1 << 48), "size": SIZE,
     "stream": st.integers(0, 1 << 48)},
    optional={"time_us": st.integers(0, 1 << 52), "frames": FRAMES, "device_free": SIZE})
DOCUMENT = st.fixed_dictionaries({"segments": st.lists(SEGMENT, max_size=5),
                                  "device_traces": st.lists(st.lists(EVENT, max_size=12), max_size=3)})
SCALAR = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8)
KEY = st.text(max_size=12) | st.sampled_from(["segments", "device_traces", "blocks"])
ANY = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=4)
                   | st.dictionaries(KEY, inner, max_size=4), max_leaves=20)


@pytest.mark.parametrize("kind", [kind.name for kind in formats.FORMATS])
def test_damaged_files_crash_nothing(kind: str) -> None:
    """Thousands of damaged files in a limited process: each is read or refused in a sentence, none hangs or crashes."""
    found = runner.run(kind, 0, EACH)
    assert found.crashes == []
    assert found.inputs == EACH
    assert found.accepted > EACH // 100  # or the damage would never get past the first look
    assert found.refused > EACH // 10
    assert found.rss < runner.MEMORY


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_once_crashed_does_so_no_more(path: Path, tmp_path: Path) -> None:
    """Every input that the fuzzer found a fault with, by its bytes."""
    kind = formats.by_name(path.stem.split("-")[0])
    try:
        kind.read(path.read_bytes(), str(tmp_path / "input"))
    except ValueError as error:
        assert worker.is_sentence(str(error))


def test_the_runner_tells_a_crash_a_death_and_a_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fuzzer that cannot fail proves nothing: a reader that raises, dies or loops is counted with its number."""
    monkeypatch.setattr(runner, "SILENCE", 0.5)
    (tmp_path / "sitecustomize.py").write_text(
        "import kvobs.allocator.readers._formats as f, os\n"
        "whole = f.parse\n"
        "def parse(data, *rest, **named):\n"
        "    if sum(data) % 50 == 7: raise KeyError('planted')\n"
        "    if sum(data) % 50 == 8: os._exit(9)\n"
        "    while sum(data) % 50 == 41: pass\n"
        "    return whole(data, *rest, **named)\n"
        "f.parse = parse\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = runner.run("json", 0, 200)
    sums = {number: sum(formats.damaged(formats.by_name("json"), number)) % 50 for number in range(200)}
    for planted, words in ((7, "planted"), (8, "status 9"), (41, "hangs")):
        wanted = {number for number, total in sums.items() if total == planted}
        assert wanted
        assert {number for number, why in found.crashes if words in why} == wanted
    assert found.inputs == 200


@given(DOCUMENT, st.sampled_from([2, 3, 4, 5, "json"]))
def test_any_snapshot_reads_as_it_was_written(document: dict[str, Any], form: int | str) -> None:
    """States, events and stacks of random documents equal a plain walk of the document, also after the way back."""
    data = json.dumps(document).encode() if form == "json" else pickle.dumps(document, int(form))
    found = _formats.parse(data, "x")
    assert _wire.unpack(_wire.pack(found), "x") == found
    devices = {device.device: device for device in found.devices}
    for number, device in devices.items():
        wanted = sorted((s for s in document["segments"] if s["device"] == number), key=lambda s: s["address"])
        assert [(s.address, s.size, s.stream, found.pools[s.pool], s.small, s.expandable) for s in device.state] == [
            (s["address"], s["total_size"], s["stream"], s["segment_pool_id"], s["segment_type"] == "small",
             s["is_expandable"]) for s in wanted]
        for got, segment in zip(device.state, wanted, strict=True):
            assert sorted((b.size, b.requested, found.stacks.of(b.stack)) for b in got.blocks) == sorted(
                (b["size"], b["requested_size"], stack_of(b)) for b in segment["blocks"])
        traces = document["device_traces"]
        trace = traces[number] if number < len(traces) else []
        events = device.events
        assert list(events.action) == [ACTIONS.index(e["action"] if e["action"] in ACTIONS else "other") for e in trace]
        assert list(events.address) == [
            e.get("device_free", e["addr"]) if e["action"] == "oom" else e["addr"] for e in trace]
        assert list(events.size) == [e["size"] for e in trace]
        assert list(events.stream) == [e["stream"] for e in trace]
        assert list(events.time_us) == [e.get("time_us", UNKNOWN) for e in trace]
        assert [found.stacks.of(stack) for stack in events.stack] == [stack_of(e) for e in trace]
    assert sum(map(len, document["device_traces"])) == sum(len(device.events) for device in found.devices)
    assert len(document["segments"]) == sum(len(device.state) for device in found.devices)


def stack_of(told: dict[str, Any]) -> tuple[tuple[str, int, str], ...]:
    return tuple((frame["filename"], frame["line"], frame["name"]) for frame in told.get("frames", ()))


@given(ANY, st.sampled_from([2, 3, 4, 5]))
def test_the_walk_lets_plain_data_pass_as_it_is(document: Any, protocol: int) -> None:
    """What the walk accepts is loaded as the standard library loads it; only integers of over 9 bytes are refused."""
    data = pickle.dumps(document, protocol)
    try:
        found = _pickle.load(data, lambda done: None)
    except Refused as refused:
        assert "integer" in str(refused)
        return
    assert pickle.dumps(found, protocol) == data or repr(found) == repr(document)


@given(ANY, st.sampled_from(["json", "pickle"]))
def test_any_data_is_read_or_refused(document: Any, form: str) -> None:
    """Whatever plain data a file holds, the answer is a recording or one sentence."""
    data = pickle.dumps(document) if form == "pickle" else json.dumps(document).encode()
    try:
        _formats.parse(data, "x")
    except ValueError as refused:
        assert worker.is_sentence(str(refused))


@given(st.binary(max_size=200),
       st.sampled_from([b"", b"\x80\x04", b"\x80\x02", b"[", b"{", b"\x1f\x8b\x08", b"<html>"]))
def test_any_bytes_are_refused_or_read(data: bytes, start: bytes) -> None:
    """Random bytes behind the first bytes of each kind end in a recording or in one sentence."""
    try:
        _formats.parse(start + data, "x")
    except ValueError as refused:
        assert worker.is_sentence(str(refused))
