"""The short way through a large pickle gives what the whole way gives."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.allocator.readers import _condensed, _formats
from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.recording import Recording
from tests.bench._snapshots import snapshot

KEYS = ("action", "addr", "size", "stream", "time_us", "compile_context", "user_metadata", "pool_id", "frames")


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


def document(seed: int) -> dict[str, Any]:
    """A snapshot with histories in torch's form, with keys in some order, and some events of another form."""
    draw = random.Random(seed)
    frames = [{"name": f"f{draw.randrange(9)}", "filename": "a" * draw.choice((3, 70, 300)) + f"{number}.py",
               "line": number} for number in range(12)]
    keys = [key for key in KEYS if key in {"action", "addr", "size", "frames"} or draw.random() < 0.7]
    if draw.random() < 0.3:
        draw.shuffle(keys)
    stacks: list[list[dict[str, Any]]] = [[]]
    texts = [f"context {number}" for number in range(3)]

    def event() -> dict[str, Any]:
        if draw.random() < 0.6:
            depth = draw.choice((0, 1, 2, 40))
            stacks.append([draw.choice(frames) for _ in range(depth)])
        values = {
            "action": draw.choice(("alloc", "free_requested", "free_completed", "segment_alloc", "new")),
            "addr": draw.choice((0, 255, 65_535, 1 << 20, 0x7F00_0000_0000, (1 << 62) + 1)) + 512 * draw.randrange(9),
            "size": draw.choice((1, 300, 70_000, 1 << 31, 1 << 40)), "stream": draw.choice((0, 7, -3, 1 << 40)),
            "time_us": 1_700_000_000_000_000 + draw.randrange(1000),
            "compile_context": draw.choice(("N/A", f"own {draw.random()}", *texts)),
            "user_metadata": draw.choice(("", texts[0])), "pool_id": (0, draw.randrange(3)),
            "frames": draw.choice(stacks[-3:])}
        made = {key: values[key] for key in keys}
        if draw.random() < 0.05:
            made["action"] = "oom"
            made["device_free"] = made.pop("addr")
        if draw.random() < 0.02:
            made["unheard_of"] = [1, {"of": 2.5}]
        return made

    traces = [[event() for _ in range(draw.choice((0, 3, 40, 1200)))] for _ in range(draw.choice((1, 2, 3)))]
    return {"segments": [{"device": 0, "address": 1 << 30, "total_size": 2 << 20, "stream": 0, "blocks": [
        {"address": 1 << 30, "size": 2 << 20, "requested_size": 5, "state": "inactive", "frames": stacks[-1]}]}],
        "device_traces": traces}


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), protocol=st.sampled_from((4, 5)))
def test_short_and_whole_give_the_same(seed: int, protocol: int) -> None:
    """Whatever events look like, and wherever frames and texts are shared, both ways read the same recording."""
    data = pickle.dumps(document(seed), protocol)
    short = _formats.condensed(data, "file")
    if short is not None:
        assert told(short) == told(_formats.whole(data, "file"))


@pytest.mark.parametrize("expandable", [False, True])
def test_of_a_server_nearly_all_events_are_condensed(expandable: bool) -> None:
    """A server's history comes out the same, and of 20,000 events all but those that begin or end a part are short."""
    made = snapshot(20_000, expandable=expandable)
    data = pickle.dumps(made)
    found = _condensed.condensed(data, lambda done: None)
    assert found is not None
    assert len(pickle.loads(found.pickle)[0]["device_traces"][0]) == 20_000
    assert sum(one is None for one in pickle.loads(found.pickle)[0]["device_traces"][0]) > 19_000
    short = _formats.condensed(data, "file")
    assert short is not None
    assert told(short) == told(_formats.whole(data, "file"))


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 60), place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), cut=st.booleans())
def test_damage_is_no_crash(seed: int, place: float, change: int, cut: bool) -> None:
    """A changed byte or a missing end leads to a recording, to the whole way, or to one sentence; nothing else."""
    data = bytearray(pickle.dumps(document(seed)))
    at = int(place * len(data))
    data[at] ^= change
    damaged = bytes(data[:at]) if cut else bytes(data)
    _formats.condensed(damaged, "file")
    if cut:
        with pytest.raises(Refused):
            _formats.whole(damaged, "file")


def test_older_pickles_have_no_short_form() -> None:
    """Protocol 2 numbers its memo entries itself; it is read the whole way."""
    assert _condensed.condensed(pickle.dumps(document(1), 2), lambda done: None) is None
