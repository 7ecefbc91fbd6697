"""What a program asked of its allocator, taken from a recording and freed of where the allocator put it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvobs.allocator import program as ops
from kvobs.allocator import recording, script
from kvobs.allocator.capacity import granted, reserved_before, reserved_bytes
from kvobs.allocator.program import Program
from kvobs.allocator.recording import GIVEN_BACK, UNKNOWN, DeviceRecording, Events, Stacks
from kvobs.allocator.script import Script, script_of
from kvobs.allocator.seeding import seed
from kvobs.allocator.settings import SMALL_SEGMENT, SMALL_SIZE, Settings
from kvobs.allocator.state import INACTIVE, PENDING, State

EMPTIES = frozenset({"empty_cache", "emptyCache"})  # functions whose frames name the caller of a release


@dataclass(slots=True)
class RecordedDemand:
    """A program and where it comes from.

    ``event`` has one entry per operation: the event it stands for, UNKNOWN for what was there before the first event.
    ``stack`` has one entry per handle. ``failed`` are the operations that ran out of memory in the recording; each is
    freed directly afterwards, because what the program would have done with the memory is not known. ``refused`` lists
    totals of reserved bytes that the device did not grant at first (it did once memory had been given back).
    ``history`` says that there are requests of known order. ``notes`` are whole sentences.
    """

    program: Program = field(default_factory=Program)
    event: array[int] = field(default_factory=lambda: array("q"))
    stack: array[int] = field(default_factory=lambda: array("i"))
    failed: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    history: bool = False
    notes: list[str] = field(default_factory=list)
    _lasted: array[int] | None = field(default=None, compare=False, repr=False)

    def add(self, event: int, op: int, handle: int = 0, size: int = 0, stream: int = 0, pool: int = 0) -> None:
        """Append an operation that stands for an event."""
        self.program.add(op, handle, size, stream, pool)
        self.event.append(event)

    def lasted_us(self, events: Events) -> array[int]:
        """How long the state after each operation lasted in the recording; 1 for each where it has no times."""
        if self._lasted is None:
            self._lasted = self._lasting(events)
        return self._lasted

    def _lasting(self, events: Events) -> array[int]:
        known = events.time_us
        times = [UNKNOWN if event == UNKNOWN else known[event] for event in self.event]
        first = next((index for index, event in enumerate(self.event) if event != UNKNOWN), len(times))
        if UNKNOWN in times[first:] or len(times) - first < 2:
            return array("q", [1]) * len(times)
        found = array("q", [0]) * len(times)
        for index in range(first, len(times) - 1):
            found[index] = max(times[index + 1] - times[index], 0)
        return found

    def allocate(self, event: int, size: int, stream: int, pool: int, stack: int) -> int:
        """Append an ALLOC; returns its handle."""
        handle = len(self.stack)
        self.add(event, ops.ALLOC, handle, size, stream, pool)
        self.stack.append(stack)
        return handle


def demand_of(device: DeviceRecording, settings: Settings, stacks: Stacks | None = None) -> RecordedDemand:
    """The requests and frees of a device's history; ``settings`` are those in force when it was recorded.

    What was alive before the first event comes first, in order of address. A free that completed later than it was
    requested keeps its delay: a stream of its own (negative) is recorded on the block and advances where it completed.
    Memory given back without need, by ``torch.cuda.empty_cache``, stays EMPTY_CACHE; memory given back because a
    request failed is left to the model. Stacks tell the two apart; where a history has none, a few may be mistaken with
    expandable segments or a max_split_size. Without a history the blocks of the last state are all there is.
    """
    undone = seed(device, settings)
    maker = _Maker(device, script_of(device.events, undone.pools), settings, stacks or Stacks())
    maker.begin(undone.state)
    for index in range(len(maker.steps)):
        maker.step(index)
    return maker.end(undone.contradictions)


class _Maker:
    """One pass over the steps of a history."""

    def __init__(self, device: DeviceRecording, steps: Script, settings: Settings, stacks: Stacks) -> None:
        self.demand, self.steps, self._events, self._settings = RecordedDemand(), steps, device.events, settings
        self._reserved = reserved_before(device.events, reserved_bytes(device))
        self._granted = granted(device.events, self._reserved, settings)
        self._emptying = {index for index, stack in enumerate(stacks.stacks)
                          if any(stacks.frames[frame][2] in EMPTIES for frame in stack)}
        self._live: dict[int, int] = {}  # handle by address
        self._waiting: dict[int, int] = {}  # by address of a freed block: the stream that stands for its delay
        # Completions that may belong to what follows: their event, and the stream that stands for the delay.
        self._late: list[tuple[int, int]] = []
        self._idle: list[int] = []  # streams of delays that are over
        self._lowest = min(device.events.stream, default=0)
        self._used, self._strays = 0, 0
        self._preceded = False  # by what was there before the first event

    def begin(self, state: State) -> None:
        """What was there before the first event."""
        self.demand.history = recording.ALLOC in self._events.action or recording.OOM in self._events.action
        self._preceded = bool(state)
        waiting = []
        for segment in state:
            for block in segment.blocks:
                if block.state != INACTIVE:
                    handle = self.demand.allocate(UNKNOWN, block.requested, segment.stream, segment.pool, block.stack)
                    self._live[block.address] = handle
                    if block.state == PENDING:
                        waiting.append(block.address)
        for address in waiting:
            self._defer(UNKNOWN, address)

    def step(self, index: int) -> None:
        """One step of the history."""
        steps, kind = self.steps, self.steps.step[index]
        event, address = steps.event[index], steps.address[index]
        if kind == script.COMPLETE:
            self._complete(event, address)
            return
        released = self._released(index) if steps.first[index] != steps.first[index + 1] else []
        if self._late and not released and kind != script.OOM:
            self._flush()
        for pool in released:
            if pool:
                self.demand.add(event, ops.RELEASE_POOL, pool=pool)
        if released and (kind == script.RELEASE or self._emptied(index)):
            self.demand.add(event, ops.EMPTY_CACHE)
        if kind in {script.ALLOC, script.OOM}:
            self._ask(index, event, address)
        elif kind == script.FREE:
            self._free(event, address)
        elif kind == script.DEFER:
            self._defer(event, address)
        if self._late:
            self._late = [(event, stream) for _, stream in self._late]
            self._flush()

    def end(self, contradictions: int) -> RecordedDemand:
        """The demand, with what has to be said about it."""
        self._flush()
        demand = self.demand
        if not demand.history:
            demand.notes.append("The file has no history: the blocks of its last state are taken as one sequence of "
                                "requests in order of address, and what was freed before is not known.")
        elif self._preceded:
            demand.notes.append("The history does not begin with an empty allocator: what was allocated before its "
                                "first event is taken as requests in order of address, without the gaps between them. "
                                "The model's calls to the device are also for those, the recorded ones are not.")
        if self._strays or contradictions:
            demand.notes.append(f"{max(self._strays, contradictions)} of {len(self._events)} events contradict others "
                                "and were left out or mended.")
        return demand

    def _ask(self, index: int, event: int, address: int) -> None:
        steps = self.steps
        size, stream, pool = steps.size[index], steps.stream[index], steps.pool[index]
        if steps.step[index] == script.ALLOC and address in self._live:
            self._strays += 1
            self._free(event, address)
        handle = self.demand.allocate(event, size, stream, pool, self._events.stack[event])
        if steps.step[index] == script.ALLOC:
            self._live[address] = handle
        else:
            self.demand.failed.append(len(self.demand.program) - 1)
            self.demand.add(event, ops.FREE, handle)

    def _free(self, event: int, address: int) -> None:
        handle = self._live.pop(address, None)
        if handle is None:
            self._strays += 1
        else:
            self.demand.add(event, ops.FREE, handle)

    def _defer(self, event: int, address: int) -> None:
        """A free that will complete later."""
        handle = self._live.get(address)
        if handle is not None:
            if not self._idle:
                self._used += 1
                self._idle.append(min(self._lowest, 0) - self._used)
            stream = self._waiting[address] = self._idle.pop()
            self.demand.add(event, ops.RECORD_STREAM, handle, stream=stream)
        self._free(event, address)

    def _complete(self, event: int, address: int) -> None:
        if address in self._live:  # files that tell only this half of a free
            self._free(event, address)
        elif address in self._waiting:
            self._late.append((event, self._waiting.pop(address)))
        else:
            self._strays += 1

    def _flush(self) -> None:
        for event, stream in self._late:
            self.demand.add(event, ops.ADVANCE, stream=stream)
            self._idle.append(stream)
        self._late.clear()

    def _released(self, index: int) -> list[int]:
        """The pools of the segments that went back to the device during a step, each once."""
        steps = self.steps
        return list(dict.fromkeys(steps.call_pool[at] for at in range(steps.first[index], steps.first[index + 1])
                                  if steps.call[at] in GIVEN_BACK))

    def _emptied(self, index: int) -> bool:
        """Whether memory went back before a request rather than because of it.

        It did where the stack says so or is another than the request's, and where what went back would have served the
        request (unless it was waited for first). Without stacks, also where the device could have given what the
        request needed anyway.
        """
        steps, events = self.steps, self._events
        last = steps.event[index]
        first = steps.event[index - 1] + 1 if index else 0
        backs = [at for at in range(first, last) if events.action[at] in GIVEN_BACK]
        told = {events.stack[at] for at in backs if events.stack[at] != UNKNOWN}
        if told & self._emptying or self._fitted(index):
            return True
        if told and events.stack[last] != UNKNOWN and events.stack[last] not in told:
            return True
        if steps.step[index] == script.OOM:
            return False
        wanted = self._reserved[backs[0]] + sum(
            steps.call_size[at] for at in range(steps.first[index], steps.first[index + 1])
            if steps.call[at] not in GIVEN_BACK)
        if wanted <= self._granted and (not told or events.stack[last] == UNKNOWN):
            return True
        self.demand.refused.append(wanted)
        return False

    def _fitted(self, index: int) -> bool:
        """Whether memory that went back would have served the request, without what had to be waited for."""
        steps, settings, events = self.steps, self._settings, self._events
        rounded, limit = settings.round_size(steps.size[index]), settings.max_split_size
        waited = sorted((events.address[event], events.address[event] + settings.round_size(events.size[event]))
                        for event, _ in self._late)
        for at in range(steps.first[index], steps.first[index + 1]):
            call, size = steps.call[at], steps.call_size[at]
            if call == recording.SEGMENT_FREE:
                small = size == SMALL_SEGMENT
            else:
                small = size % settings.page_size(False) != 0
            if (call not in GIVEN_BACK or small != (rounded <= SMALL_SIZE)
                    or (steps.call_stream[at], steps.call_pool[at]) != (steps.stream[index], steps.pool[index])):
                continue
            free = _longest_gap(steps.call_address[at], steps.call_address[at] + size, waited)
            if free >= rounded and (limit is None or (free < limit if rounded < limit
                                                      else free < rounded + settings.max_non_split_rounding)):
                return True
        return False


def _longest_gap(start: int, end: int, taken: list[tuple[int, int]]) -> int:
    """The most bytes in a row between two addresses that none of the ranges, in order, takes."""
    longest = 0
    for begin, stop in taken:
        if begin < end and stop > start:
            longest, start = max(longest, begin - start), stop
    return max(longest, end - start)
