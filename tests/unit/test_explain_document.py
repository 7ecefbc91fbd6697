"""The document of explain: what a file does not tell is null in it."""

from __future__ import annotations

from array import array

from kvobs.allocator import recording as rec
from kvobs.allocator.explain import explain
from kvobs.allocator.recording import UNKNOWN, DeviceRecording, Events, Recording, Usage
from kvobs.allocator.settings import MIB
from kvobs.allocator.state import ALLOCATED, Block, Segment


def test_peaks_that_a_profiler_never_told_are_null() -> None:
    """A profiler that told only what was allocated gives no peak of what was reserved; gaps in a column are no peak."""
    usage = Usage("cuda:0", array("q", (1, 2, 3)), array("q", (UNKNOWN, 700, 500)), array("q", (UNKNOWN,) * 3))
    told, = explain(Recording("file", "trace", usage=(usage,))).document["usage"]
    assert (told["peak_allocated_bytes"], told["peak_reserved_bytes"]) == (700, None)


def test_an_oom_that_no_replay_reached_is_told_but_not_scored() -> None:
    """Blocks that do not fill their segment stop the replay; the OOM stays, and whether it was reproduced is null."""
    state = (Segment(1 << 30, 20 * MIB, 0, 0, False, False, (Block(1 << 30, MIB, MIB, ALLOCATED),)),)
    events = Events()
    for action, address, size in ((rec.FREE_REQUESTED, 1 << 40, 512), (rec.FREE_COMPLETED, 1 << 40, 512),
                                  (rec.OOM, 5 * MIB, 90 * MIB), (rec.ALLOC, 1 << 30, MIB)):
        for name, value in zip(Events.__slots__, (action, address, size, 0, UNKNOWN, UNKNOWN, UNKNOWN), strict=True):
            getattr(events, name).append(value)
    device, = explain(Recording("file", "made", devices=(DeviceRecording(0, state, events),))).document["devices"]
    oom, = device["ooms"]
    assert not device["replay"]["usable"]
    assert (oom["requested_bytes"], oom["device_free_bytes"]) == (90 * MIB, 5 * MIB)
    assert (oom["reproduced"], oom["verdict"], device["replay"]["engine"]) == (None, None, "none")
