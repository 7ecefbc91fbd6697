"""The short way through a large pickle gives what the whole way gives."""

from __future__ import annotations

import contextlib
import pickle
import pickletools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.allocator.readers import _condensed, _formats
from kvobs.allocator.readers._limits import Refused
from tests.bench._snapshots import snapshot
from tests.fuzz.documents import history
from tests.fuzz.formats import both_ways, told


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), protocol=st.sampled_from((4, 5)))
def test_short_and_whole_give_the_same(seed: int, protocol: int) -> None:
    """Whatever events look like, and wherever frames and texts are shared, both ways read the same recording."""
    data = pickle.dumps(history(seed), protocol)
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
    """A changed byte leads to one recording by both ways, or to one sentence, as a missing end always does."""
    data = bytearray(pickle.dumps(history(seed)))
    at = int(place * len(data))
    data[at] ^= change
    damaged = bytes(data[:at]) if cut else bytes(data)
    try:
        both_ways(damaged, "")
    except Refused:
        return
    assert not cut


@pytest.mark.parametrize("seed", [0, 3, 13, 28, 41])
def test_a_fetch_of_another_entry_agrees(seed: int) -> None:
    """Whichever entry of the memo an event fetches, there or not yet: both ways read it, or the short one leaves it."""
    data = pickle.dumps(history(seed))[:-1]
    fetches = [at for code, _, at in pickletools.genops(data + b".") if code.name == "LONG_BINGET"]
    memo, draw = data.count(b"\x94"), random.Random(seed)
    for at in draw.sample(fetches, 12):
        for place in (draw.randrange(memo), draw.randrange(memo), memo - 1):
            with contextlib.suppress(Refused):
                both_ways(data[:at + 1] + place.to_bytes(4, "little") + data[at + 5:] + b".", "")


def event(address: int, **more: Any) -> dict[str, Any]:
    return {"action": "alloc", "addr": address, "size": 512, "frames": [], "stream": 0, **more}


@pytest.mark.parametrize("document", [
    {"segments": [], "elsewhere": [event(512 * number) for number in range(4)],
     "device_traces": [[event(0, more=[1.5]), *(event(1 << 20 | 512 * number) for number in range(4))]]},
    {"segments": [], "device_traces": [[event(512, action=word, device_free=99) for word in ("alloc", "oom", "oom")]]},
    {"segments": [], "device_traces": [[event(512)] + [event(1024)] * 3 + [event(1536)]]}])
def test_events_that_torch_does_not_write_so_are_not_exchanged(document: dict[str, Any]) -> None:
    """Events outside the histories, of an OOM with two addresses, or named twice are read the whole way."""
    data = pickle.dumps(document)
    assert _formats.condensed(data, "file") is None
    found = _formats.pickled(data, "file").devices[0].events
    assert list(found.address) == [99 if told["action"] == "oom" else told["addr"]
                                   for told in document["device_traces"][0]]


def test_a_form_is_found_for_most_histories() -> None:
    """The tests above compare something: of the first hundred histories those whose events name no pool are short."""
    for seed in range(100):
        made = history(seed)
        first = next((trace[0] for trace in made["device_traces"] if trace), {})
        if first.get("action", "oom") != "oom" and "pool_id" not in first and "unheard_of" not in first:
            assert _formats.condensed(pickle.dumps(made), "file") is not None, seed


def test_older_pickles_have_no_short_form() -> None:
    """Protocol 2 numbers its memo entries itself; it is read the whole way."""
    assert _condensed.condensed(pickle.dumps(history(1), 2), lambda done: None) is None
