"""A recorded history as steps that either core can replay: what was asked, and what the device did meanwhile."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvobs.allocator import recording
from kvobs.allocator.recording import Events

(ALLOC, FREE, DEFER, COMPLETE, RELEASE, OOM) = range(6)
_CALLS = {recording.SEGMENT_ALLOC, recording.SEGMENT_FREE, recording.SEGMENT_MAP, recording.SEGMENT_UNMAP}


@dataclass(slots=True)
class Script:
    """Steps in order; columns of equal length, except for the device's calls.

    ``step``: ALLOC (``address`` is where the block was placed), FREE (freed at once), DEFER (freed, not complete),
    COMPLETE, RELEASE (memory went back to the device, or came from it, without a request) or OOM. ``event``: the
    index of the event that ends the step. ``size``: requested bytes. A RELEASE has size, stream and pool of the request
    that follows it with nothing but frees completing in between, for which it may have been; size -1: there is none.
    ``first`` (one entry more): the step's device calls are ``call[first[i]:first[i + 1]]``, of kinds SEGMENT_ALLOC,
    SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, with their address, size, stream and pool.
    """

    step: array[int] = field(default_factory=lambda: array("B"))
    event: array[int] = field(default_factory=lambda: array("q"))
    address: array[int] = field(default_factory=lambda: array("Q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    pool: array[int] = field(default_factory=lambda: array("i"))
    first: array[int] = field(default_factory=lambda: array("q", (0,)))
    call: array[int] = field(default_factory=lambda: array("B"))
    call_address: array[int] = field(default_factory=lambda: array("Q"))
    call_size: array[int] = field(default_factory=lambda: array("q"))
    call_stream: array[int] = field(default_factory=lambda: array("q"))
    call_pool: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.step)


def script_of(events: Events, pools: array[int]) -> Script:
    """The steps of a history. ``pools`` has the pool of every event (0 where nobody knows better).

    Device calls belong to the alloc or OOM that follows them; if something else follows, they are a RELEASE of their
    own. A free_requested directly followed by its free_completed is one FREE.
    """
    made = Script()
    actions, addresses, sizes, streams = events.action, events.address, events.size, events.stream
    calls, total, index = 0, len(actions), 0
    while index < total:
        action = actions[index]
        if action in _CALLS:
            made.call.append(action)
            made.call_address.append(addresses[index])
            made.call_size.append(sizes[index])
            made.call_stream.append(streams[index])
            made.call_pool.append(pools[index])
            calls += 1
            index += 1
            continue
        if action == recording.ALLOC:
            step = ALLOC
        elif action == recording.OOM:
            step = OOM
        elif action == recording.FREE_REQUESTED:
            step = DEFER
        elif action == recording.FREE_COMPLETED:
            step = COMPLETE
        else:
            index += 1
            continue
        if step not in {ALLOC, OOM} and made.first[-1] != calls:
            _release(made, events, pools, index)
        if (step == DEFER and index + 1 < total and actions[index + 1] == recording.FREE_COMPLETED
                and addresses[index + 1] == addresses[index]):
            step = FREE
            index += 1
        _append(made, step, index, addresses[index], sizes[index], streams[index], pools[index])
        index += 1
    if made.first[-1] != calls:
        _release(made, events, pools, total)
    return made


def _release(made: Script, events: Events, pools: array[int], index: int) -> None:
    """End the device calls before event ``index`` with a step of their own."""
    request = index
    while request < len(events) and (events.action[request] in _CALLS
                                     or events.action[request] == recording.FREE_COMPLETED):
        request += 1
    if request < len(events) and events.action[request] in {recording.ALLOC, recording.OOM}:
        _append(made, RELEASE, index - 1, 0, events.size[request], events.stream[request], pools[request])
    else:
        _append(made, RELEASE, index - 1, 0, -1, 0, 0)


def _append(made: Script, step: int, event: int, address: int, size: int, stream: int, pool: int) -> None:
    made.step.append(step)
    made.event.append(event)
    made.address.append(address)
    made.size.append(size)
    made.stream.append(stream)
    made.pool.append(pool)
    made.first.append(len(made.call))
