"""Events out of a pickle without making a dict of each: a third of the time, and of the memory.

After the first event of a file, most are written alike: the same keys, fetched from the memo, and for each a number, a
text from the memo or frames from the memo. One regular expression knows that form. Such events become numbers in
columns, and a pickle is left that has None in the place of each. It makes what the whole one makes, entry by entry of
the memo, except for the dict of such an event, which is None there too. All else passes unchanged, and only opcodes of
plain data do; where anything is unusual, and a fetch of such a dict is, there is no short form.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from typing import Any

from kvobs.allocator.readers._event_form import EventForm, Learner, More, Numbers, Unusual, fetch, kept
from kvobs.allocator.readers._events import LATEST
from kvobs.allocator.readers._frames import Interner
from kvobs.allocator.readers._limits import MAX_ADDRESS, MAX_SIZE, MAX_TEXT_BYTES, Refused
from kvobs.allocator.readers._pickle import ONE, OTHER, Data, Progress
from kvobs.allocator.recording import UNKNOWN, Events

_LARGEST_FRAME = 1 << 20  # bytes; pickle begins a new one after 64 KiB
_LONG_TEXTS = {0x58: 4, 0x8D: 8}
_MANY = 1 << 16
_STOP, _FRAME, _LIST = 0x2E, 0x95, 0x5D
_RUN = re.compile(rb"()(\}%b*+|%b++)" % (OTHER, OTHER), re.DOTALL)


class Condensed:
    """The short ``pickle`` (of a document and a list), and the events that it does not have, in their order.

    ``_frames`` are places in the list. None of them names a pool.
    """

    def __init__(self) -> None:
        self.pickle = b""
        self._events = Events()
        self._frames = array("q")
        self._numbers = Numbers()
        self._stack_of: list[int] = []
        self._passed = 0

    def resolve(self, lists: list[Any], stacks: Interner) -> None:
        """Take what the short pickle made of the list.

        Raises:
            Refused: something in it is no list of frames.
        """
        self._stack_of = [stacks.stack(frames) for frames in lists]

    def append(self, found: Events, count: int) -> None:
        """Append the next ``count`` events.

        Raises:
            Refused: there are not so many.
        """
        first, self._passed = self._passed, self._passed + count
        if self._passed > len(self._frames):
            raise Refused("One of the events is missing, and must be a dict.")
        for name in ("action", "address", "size", "stream", "time_us"):
            getattr(found, name).extend(getattr(self._events, name)[first:self._passed])
        found.stack.extend([self._stack_of[place] for place in self._frames[first:self._passed]])
        found.pool.extend(array("i", (UNKNOWN,)) * count)

    def end(self) -> None:
        """The histories are read.

        Raises:
            Refused: events are left: some lie outside the histories, so that those in them may have been exchanged.
        """
        if self._passed < len(self._frames):
            raise Refused("Some of its events are in no history.")

    def add(self, form: EventForm, rows: list[tuple[bytes, ...]], actions: dict[bytes, int],
            frames: list[int]) -> None:
        """Add events as they stand in the file.

        Raises:
            Refused: a number is out of range.
        """
        found, columns = self._events, list(zip(*rows, strict=True))

        def column(name: str, default: int) -> array[int]:
            group = form.groups.get(name)
            return array("q", (default,)) * len(rows) if group is None else self._numbers.column(columns[group])

        found.action.extend([actions[op] for op in columns[form.action]])
        found.address.frombytes(_within(column("addr", 0), 0, MAX_ADDRESS, "address").tobytes())
        found.size.extend(_within(column("size", 0), 0, MAX_SIZE + 1, "size"))
        found.stream.extend(column("stream", 0))
        found.time_us.extend(_within(column("time_us", UNKNOWN), UNKNOWN, LATEST, "time_us"))
        self._frames.extend(frames)


def _within(column: array[int], low: int, high: int, what: str) -> array[int]:
    if min(column) < low or max(column) >= high:
        wrong = next(value for value in column if not low <= value < high)
        raise Refused(f"The {what} of an event is {wrong}, and must be between {low} and {high - 1}.")
    return column


def condensed(data: Data, progress: Progress) -> Condensed | None:
    """The short form of a pickle; None where there is none, and the whole one must be walked and loaded.

    Raises:
        Refused: a number of an event is out of range.
    """
    if data[:2] not in (b"\x80\x04", b"\x80\x05"):
        return None
    try:
        return _Condenser().run(data, progress)
    except (Unusual, IndexError):  # the latter where it is cut off
        return None


class _Condenser:
    """Walks once."""

    def __init__(self) -> None:
        self._made = Condensed()
        self._out: list[bytes] = []
        self._learner = Learner()
        self._form: EventForm | None = None
        self._more: dict[bytes, More] = {}
        self._plain: set[bytes] = set()  # further fields that leave nothing behind
        self._fetched: dict[bytes, int] = {}  # opcodes that fetch a list of frames: their places
        self._lists: dict[bytes, tuple[int, bytes]] = {}  # how a list is written: its place, and how it is made again
        self._exchanged = array("Q")  # places in the memo, ascending, of dicts that are None in the short pickle
        self._last = -1, 0  # the list made last: its number in the memo, and its place

    def run(self, data: Data, progress: Progress) -> Condensed:
        self._out.append(bytes(data[:2]))
        position, size = 2, len(data)
        while position < size:
            code = data[position]
            if code == _FRAME:
                start = position + 9
                position = start + int.from_bytes(data[position + 1:start], "little")
                if position > size or position - start > _LARGEST_FRAME:
                    raise Unusual
                if self._piece(bytes(data[start:position])):
                    break
                progress(position / size)
            elif code in _LONG_TEXTS:
                position = self._long_text(data, position)
            elif code == _STOP:
                break
            else:
                raise Unusual
        else:
            raise Unusual
        self._out.append(b"](" + b"".join(self._fetched) + b"e\x86." if self._fetched else b"]\x86.")
        self._made.pickle = b"".join(self._out)
        return self._made

    def _piece(self, piece: bytes) -> bool:
        """The opcodes of one frame; True: the pickle ends with it."""
        if self._form is not None:
            found = self._form.pattern.findall(piece)
            if sum([len(one[0]) + len(one[-1]) for one in found]) == len(piece):
                self._take(found)
                return False
        position = 0
        while position < len(piece):
            match = (_RUN if self._form is None else self._form.pattern).match(piece, position)
            if match is not None:
                self._take([match.groups(b"")])
                position = match.end()
            elif piece[position] in _LONG_TEXTS:
                position = self._long_text(piece, position)
            elif piece[position] == _STOP:
                return True
            else:
                raise Unusual
        return False

    def _long_text(self, data: Data, position: int) -> int:
        width = _LONG_TEXTS[data[position]]
        start = position + 1 + width
        end = start + int.from_bytes(data[position + 1:start], "little")
        if end > len(data) or end - start > MAX_TEXT_BYTES:
            raise Unusual
        self._out.append(bytes(data[position:end]))
        self._learner.see(b"")
        return end

    def _take(self, found: list[tuple[bytes, ...]]) -> None:
        """Events, and runs of other opcodes between them. About 1 us per event."""
        frames: list[int] = []
        form, learner, emit, lists, plain = self._form, self._learner, self._out.append, self._lists, self._plain
        memo, (last, last_place), exchanged = learner.memo, self._last, self._exchanged
        for one in found:
            if not one[0]:
                learner.memo = memo
                self._pass_on(one[-1])
                memo = learner.memo
                continue
            assert form is not None
            emit(b"N\x94")
            exchanged.append(memo)
            memo += 1
            for group in form.before:
                if one[group] not in plain:
                    memo += self._keep(one[group], memo).memos
            listed = one[form.frames]
            if listed[0] == _LIST:
                try:
                    last_place, same = lists[listed]
                    emit(same)
                except KeyError:
                    self._fetches(listed)
                    own = fetch(memo)
                    last_place = self._fetched[own] = len(self._fetched)
                    lists[listed] = last_place, own + b"\x940"
                    emit(listed + b"0")
                frames.append(last_place)
                last = memo
                memo += 1
            elif (fetched := int.from_bytes(listed[1:], "little")) == last:
                frames.append(last_place)
            else:
                place = self._fetched.get(listed)
                if place is None:
                    if fetched >= memo:
                        raise Unusual
                    self._fetches(listed)
                    place = self._fetched[listed] = len(self._fetched)
                frames.append(place)
            for group in form.after:
                if one[group] not in plain:
                    memo += self._keep(one[group], memo).memos
        learner.memo, self._last = memo, (last, last_place)
        if frames and form is not None:
            rows = found if len(frames) == len(found) else [one for one in found if one[0]]
            self._made.add(form, rows, learner.actions, frames)

    def _fetches(self, ops: bytes) -> None:
        """Look at what opcodes fetch.

        Raises:
            Unusual: an event that is None in the short pickle.
        """
        for op in ONE.findall(ops):
            if op[:1] in (b"h", b"j"):
                place = int.from_bytes(op[1:], "little")
                at = bisect_left(self._exchanged, place)
                if at < len(self._exchanged) and self._exchanged[at] == place:
                    raise Unusual

    def _keep(self, told: bytes, memo: int) -> More:
        """Keep further fields of an event, as far as they matter; so many entries has the memo before them.

        Raises:
            Unusual: they fetch one that is not there yet.
        """
        more = self._more.get(told)
        if more is None:
            if len(self._more) > _MANY:
                self._more.clear()
            more = self._more[told] = kept(told, memo)
            if not more.memos and len(self._plain) < _MANY:
                self._plain.add(told)
        if more.memos:
            self._out.append(more.kept)
        return more

    def _pass_on(self, run: bytes) -> None:
        """Opcodes that are no event."""
        self._out.append(run)
        if self._exchanged:
            self._fetches(run)
        if self._form is None or b"\x94" in run:
            for op in ONE.findall(run):
                self._learner.see(op)
            self._form = self._learner.form
        else:
            self._learner.see(b"")
