"""Every distinct stack once, whatever the file repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvobs.allocator.readers._limits import (
    MAX_FRAMES,
    MAX_STACK_DEPTH,
    MAX_STACK_FRAMES,
    MAX_TEXT,
    MAX_TEXT_BYTES,
    Refused,
)
from kvobs.allocator.recording import UNKNOWN, Stacks

_LINES = range(-(1 << 31), 1 << 31)


class Interner:
    """Stacks by what they say. Objects are looked up by identity first: the document must outlive the interner.

    In a pickle the frames of all events are the same objects, so that an event costs one hash of their ids.
    """

    def __init__(self) -> None:
        self._frames: dict[tuple[str, int, str], int] = {}
        self._by_id: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._by_ids: dict[tuple[int, ...], int] = {}
        self._last: list[Any] | None = None
        self._last_index = UNKNOWN
        self._by_text: dict[bytes, int] = {}
        self._texts: dict[str, str] = {}
        self._text_bytes = 0
        self._total = 0

    def stack(self, frames: Any) -> int:
        """The index of a list of frames; UNKNOWN for none.

        Raises:
            Refused: not a list of frames, or too many.
        """
        if not frames:
            if frames is None or type(frames) is list:
                return UNKNOWN
            raise Refused(f"The frames of an event are {kind(frames)}, and must be a list.")
        if type(frames) is msgspec.Raw:
            return self._raw(bytes(frames))
        if type(frames) is not list:
            raise Refused(f"The frames of an event are {kind(frames)}, and must be a list.")
        if frames is self._last:  # both halves of a free
            return self._last_index
        key = tuple(map(id, frames))
        found = self._by_ids.get(key)
        if found is None:
            found = self._by_ids[key] = self._add(tuple([self._frame_at(frame) for frame in frames]))
        self._last, self._last_index = frames, found
        return found

    def result(self) -> Stacks:
        """All that was met."""
        return Stacks(tuple(self._frames), tuple(self._stacks))

    def _raw(self, text: bytes) -> int:
        found = self._by_text.get(text)
        if found is None:
            frames = msgspec.json.decode(text)
            if frames is not None and type(frames) is not list:
                raise Refused(f"The frames of an event are {kind(frames)}, and must be a list.")
            found = self._add(tuple([self._frame(frame) for frame in frames])) if frames else UNKNOWN
            self._by_text[text] = found
        return found

    def _add(self, stack: tuple[int, ...]) -> int:
        found = self._stacks.get(stack)
        if found is None:
            self._total += len(stack)
            if len(stack) > MAX_STACK_DEPTH or self._total > MAX_STACK_FRAMES:
                raise Refused(f"Its stacks are too large: {MAX_STACK_DEPTH:,} frames are allowed in one and "
                              f"{MAX_STACK_FRAMES:,} in all distinct ones.")
            found = self._stacks[stack] = len(self._stacks)
        return found

    def _frame_at(self, frame: Any) -> int:
        found = self._by_id.get(id(frame))
        if found is None:
            found = self._by_id[id(frame)] = self._frame(frame)
        return found

    def _frame(self, frame: Any) -> int:
        if type(frame) is not dict:
            raise Refused(f"A frame is {kind(frame)}, and must be a dict of name, filename and line.")
        name, filename, line = frame.get("name"), frame.get("filename"), frame.get("line")
        if type(name) is not str or type(filename) is not str or type(line) is not int or line not in _LINES:
            raise Refused("A frame's name and filename must be texts and its line a whole number; "
                          f"they are {kind(name)}, {kind(filename)} and {kind(line)}.")
        found = self._frames.setdefault((self.text(filename), line, self.text(name)), len(self._frames))
        if found == MAX_FRAMES:
            raise Refused(f"It names more than {MAX_FRAMES:,} different frames, which are allowed.")
        return found

    def text(self, text: str) -> str:
        """One name, the same object for equal ones; what UTF-8 cannot hold is replaced.

        Raises:
            Refused: too long, or too much in all.
        """
        found = self._texts.get(text)
        if found is None:
            encoded = text.encode("utf-8", "replace")
            self._text_bytes += len(encoded)
            if len(text) > MAX_TEXT or self._text_bytes > MAX_TEXT_BYTES:
                raise Refused(f"Its names are too long: {MAX_TEXT:,} characters are allowed in one and "
                              f"{MAX_TEXT_BYTES:,} bytes in all.")
            found = self._texts[text] = encoded.decode()
        return found


def kind(value: Any) -> str:
    """The type of a value in words."""
    names: Sequence[tuple[type, str]] = ((bool, "a truth value"), (int, "a whole number"), (float, "a number"),
                                         (str, "a text"), (list, "a list"), (tuple, "a pair"), (dict, "a dict"))
    if value is None:
        return "missing"
    return next((name for each, name in names if type(value) is each), "something else")
