"""A recorded history as steps that either core can replay: what was asked, and what the device did meanwhile."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvobs.allocator import recording
from kvobs.allocator.recording import Events

(ALLOC, FREE, DEFER, COMPLETE, RELEASE, OOM) = range(6)
_CALLS = recording.TAKEN | recording.GIVEN_BACK


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
    own. A free_requested directly followed by its free_completed is one FREE. About 0.3 us per event.
    """
    made, marks, releases = Script(), list[tuple[int, int]](), list[tuple[int, int, int, int]]()
    actions, addresses, codes, ends = events.action, events.address, made.step, made.event
    waiting, merged, last = False, -1, len(actions) - 1
    for index, action in enumerate(actions):
        if action > recording.FREE_COMPLETED and action != recording.OOM:
            if action <= recording.SEGMENT_UNMAP:
                _call(made, events, pools, index)
                waiting = True
            continue
        if index == merged:
            continue
        if waiting:
            waiting = False
            marks.append((len(codes), len(made.call)))
            if action not in {recording.ALLOC, recording.OOM}:
                _release(made, releases, events, pools, index)
        if action == recording.ALLOC:
            codes.append(ALLOC)
            ends.append(index)
        elif action != recording.FREE_REQUESTED:
            codes.append(OOM if action == recording.OOM else COMPLETE)
            ends.append(index)
        elif (index < last and actions[index + 1] == recording.FREE_COMPLETED
                and addresses[index + 1] == addresses[index]):
            merged = index + 1
            codes.append(FREE)
            ends.append(merged)
        else:
            codes.append(DEFER)
            ends.append(index)
    if waiting:
        marks.append((len(codes), len(made.call)))
        _release(made, releases, events, pools, len(actions))
    _fill(made, marks, releases, events, pools)
    return made


def _call(made: Script, events: Events, pools: array[int], index: int) -> None:
    made.call.append(events.action[index])
    made.call_address.append(events.address[index])
    made.call_size.append(events.size[index])
    made.call_stream.append(events.stream[index])
    made.call_pool.append(pools[index])


def _release(made: Script, releases: list[tuple[int, int, int, int]], events: Events, pools: array[int],
             index: int) -> None:
    """End the device calls before event ``index`` with a step of their own."""
    request = index
    while request < len(events) and (events.action[request] in _CALLS
                                     or events.action[request] == recording.FREE_COMPLETED):
        request += 1
    if request < len(events) and events.action[request] in {recording.ALLOC, recording.OOM}:
        releases.append((len(made.step), events.size[request], events.stream[request], pools[request]))
    else:
        releases.append((len(made.step), -1, 0, 0))
    made.step.append(RELEASE)
    made.event.append(index - 1)


def _fill(made: Script, marks: list[tuple[int, int]], releases: list[tuple[int, int, int, int]], events: Events,
          pools: array[int]) -> None:
    """The columns that follow from each step's event. ``marks``: the steps with device calls, and how many there were
    up to their end; ``releases``: the steps that are a RELEASE, with size, stream and pool.
    """
    for column, told in ((made.address, events.address), (made.size, events.size), (made.stream, events.stream),
                         (made.pool, pools)):
        column.extend([told[event] for event in made.event])
    for step, size, stream, pool in releases:
        made.address[step], made.size[step], made.stream[step], made.pool[step] = 0, size, stream, pool
    calls = 0
    for step, calls_then in [*marks, (len(made.step), 0)]:
        made.first.extend(array("q", (calls,)) * (step + 1 - len(made.first)))
        calls = calls_then
