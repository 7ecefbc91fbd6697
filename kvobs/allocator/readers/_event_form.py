"""How the events of a pickle are written, learned from the first one."""

from __future__ import annotations

import re
import sys
from array import array
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kvobs.allocator.readers._pickle import GET, INTEGER, ONE, OTHER, TEXT
from kvobs.allocator.readers._pools import POOL_KEYS
from kvobs.allocator.recording import ACTIONS
from kvobs.allocator.recording import OTHER as UNKNOWN_ACTION

_NUMBERS = ("addr", "size", "stream", "time_us")
_APART = frozenset({*POOL_KEYS, "device_free"})  # a pair has too many forms; device_free goes before addr in an OOM
_GETS = rb"(?:j....j....j....j....)*+%b*+" % GET
_FORMS = {"action": rb"(%b)" % GET, "frames": rb"(\]\x94(?:\(%be|%ba)?+|%b)" % (_GETS, GET, GET),
          **dict.fromkeys(_NUMBERS, rb"(%b)" % INTEGER)}
_MORE = rb"(?:%b|[N\x88\x89]|%b\x94|%b%b\x86\x94|%b)" % (GET, TEXT, INTEGER, INTEGER, INTEGER)
_MEMOIZE, _FIRST_KEY, _BEFORE = b"\x94", b"\x8c\x06action", [b"}", b"\x94", b"("]
_LONGEST_KEY = 64
_LONG = 0x8A


class Unusual(Exception):
    """A pickle that has no short form."""


class More(NamedTuple):
    """Fields of an event that are kept in the short pickle for what they put into the memo: how, and how much."""

    kept: bytes
    memos: int


class EventForm:
    """``pattern`` finds an event, else a run of other opcodes up to the next dict.

    Of its groups the first is the event, the last the run; ``groups`` are those of the known fields between, counted
    from 0. ``before`` and ``after`` are those of further fields in front of the frames and behind them.
    """

    def __init__(self, keys: list[tuple[str, int]]) -> None:
        """``keys`` in their order, each with its place in the memo.

        Raises:
            Unusual: one that every event has is missing, or there twice, or one needs to be looked at as a whole.
        """
        names = [name for name, _ in keys if name in _FORMS]
        if any(name in _APART for name, _ in keys) or not {"action", "addr", "size", "frames"} <= set(names) \
                or len(set(names)) < len(names):
            raise Unusual
        self.groups: dict[str, int] = {}
        self.before: list[int] = []
        self.after: list[int] = []
        fields, group = b"", 0
        for known, run in groupby(keys, lambda key: key[0] in _FORMS):
            parts = [(name, re.escape(fetch(place))) for name, place in run]
            if known:
                for name, key in parts:
                    fields += key + _FORMS[name]
                    self.groups[name] = group = group + 1
            else:
                fields += b"(" + b"".join(key + _MORE for _, key in parts) + b")"
                group += 1
                (self.after if "frames" in self.groups else self.before).append(group)
        self.pattern = re.compile(rb"(\}\x94\(%bu)|(\}%b*+|%b++)" % (fields, OTHER, OTHER), re.DOTALL)
        self.action, self.frames = self.groups["action"], self.groups["frames"]


class Learner:
    """Sees opcodes one by one: counts the memo, keeps its short texts, and learns the form of the first event."""

    def __init__(self) -> None:
        self.memo = 0
        self.form: EventForm | None = None
        self.actions = _Actions()
        self._text: str | None = None
        self._before: deque[bytes] = deque(maxlen=3)
        self._event: list[tuple[bytes, int]] = []  # its opcodes from the first key on, each with the memo's length
        self._depth = 0

    def see(self, op: bytes) -> None:
        """Take notice of an opcode; empty for one that does not matter."""
        if self.form is None:
            self._learn(op)
        if op == _MEMOIZE:
            if self._text is not None:
                self.actions.texts[self.memo] = self._text
            self.memo += 1
        self._text = op[2:].decode("utf-8", "replace") if op[:1] == b"\x8c" and len(op) < _LONGEST_KEY else None

    def _learn(self, op: bytes) -> None:
        if not self._event:
            if op == _FIRST_KEY and list(self._before) == _BEFORE:
                self._depth = 1
                self._event.append((op, self.memo))
            self._before.append(op)
            return
        self._event.append((op, self.memo))
        self._depth += (op == b"(") - (op in (b"e", b"u"))
        if self._depth == 0:
            self.form = EventForm(self._keys())

    def _keys(self) -> list[tuple[str, int]]:
        """The keys of the event, with their places in the memo."""
        found: list[tuple[str, int]] = []
        at, last = 0, len(self._event) - 1
        while at < last:
            op, _ = self._event[at]
            if op[:1] == b"\x8c" and self._event[at + 1][0] == _MEMOIZE:
                place = self._event[at + 1][1]
                at += 1
            elif op[:1] in (b"h", b"j"):
                place = int.from_bytes(op[1:], "little")
            else:
                raise Unusual
            if place not in self.actions.texts:  # written in another way: it might be any key
                raise Unusual
            found.append((self.actions.texts[place], place))
            at = self._after_value(at + 1)
        return found

    def _after_value(self, at: int) -> int:
        """Behind the value that begins there: one opcode, or a list or dict, and what puts it into the memo."""
        ops = self._event
        opens = ops[at][0] in (b"]", b"}")
        at += 1
        if ops[at][0] == _MEMOIZE:
            at += 1
        if opens and ops[at][0] == b"(":
            depth = 0
            while True:
                depth += (ops[at][0] == b"(") - (ops[at][0] in (b"e", b"u"))
                at += 1
                if depth == 0:
                    break
        return at


class _Actions(dict[bytes, int]):
    """The action that an opcode fetches."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[int, str] = {}

    def __missing__(self, op: bytes) -> int:
        text = self.texts.get(int.from_bytes(op[1:], "little"))
        if text is None:
            raise Unusual
        found = self[op] = ACTIONS.index(text) if text in ACTIONS else UNKNOWN_ACTION
        return found


class Numbers(dict[bytes, int]):
    """What opcodes of whole numbers mean, each looked at once."""

    _MANY = 1 << 16

    def __missing__(self, op: bytes) -> int:
        if len(self) > self._MANY:
            self.clear()
        found = self[op] = number(op)
        return found

    def column(self, ops: Sequence[bytes]) -> array[int]:
        """The values of many; those of one width byte by byte, for all at once."""
        width, whole = len(ops[0]), b"".join(ops)
        head = 2 if ops[0][0] == _LONG else 1
        places = range(head, width)
        alike = len(whole) == width * len(ops) and len(places) < 8 and all(
            whole[at::width] == ops[0][at:at + 1] * len(ops) for at in range(head))
        if not alike or (width > 2 and max(whole[width - 1::width]) > 127):  # perhaps below zero
            return array("q", [self[op] for op in ops])
        found = bytearray(8 * len(ops))
        for at in places:
            found[at - head::8] = whole[at::width]
        return array("q", bytes(found)) if sys.byteorder == "little" else array("q", [self[op] for op in ops])


def number(op: bytes) -> int:
    """The value of BININT1, BININT2, BININT or LONG1."""
    if op[0] == _LONG:
        return int.from_bytes(op[2:], "little", signed=True)
    return int.from_bytes(op[1:], "little", signed=op[0] == 0x4A)


def kept(told: bytes, memo: int) -> More:
    """What is kept of further fields as they are written: nothing of those that put nothing into the memo.

    Raises:
        Unusual: they fetch an entry that the memo, so long before them, does not have yet.
    """
    memos = 0
    for op in ONE.findall(told):
        memos += op == _MEMOIZE
        if op[:1] in (b"h", b"j") and int.from_bytes(op[1:], "little") >= memo + memos:
            raise Unusual
    return More(b"(" + told + b"1" if memos else b"", memos)


def fetch(place: int) -> bytes:
    """What fetches an entry of the memo."""
    return b"h" + bytes((place,)) if place < 256 else b"j" + place.to_bytes(4, "little")
