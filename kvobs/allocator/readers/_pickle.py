"""Loading a pickle of plain data. Nothing in it can name code, and it is walked before pickle sees it.

The walk knows the opcodes of dicts, lists, texts, numbers, pairs of integers, True, False and None, which is all that
torch writes. Everything else is refused: globals, calls, persistent ids, extension codes, memo indices beyond what the
file's length can fill (nine bytes may otherwise ask for gigabytes, which pickle reserves before the next opcode), and
other tuples (as keys of a dict they would be hashed by recursion, of any depth).
"""

from __future__ import annotations

import io
import mmap
import pickle
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from kvobs.allocator.readers._limits import MAX_TEXT_BYTES, Refused

Data = bytes | bytearray | mmap.mmap
Progress = Callable[[float], None]
_CHUNK = 1 << 20
_MEMO_SPARE = 1 << 16  # entries; what a short file may skip
_MEANING = {
    "c": "names code (GLOBAL)", "\x93": "names code (STACK_GLOBAL)", "i": "names code (INST)",
    "o": "builds an object (OBJ)", "\x81": "builds an object (NEWOBJ)", "\x92": "builds an object (NEWOBJ_EX)",
    "R": "calls a function (REDUCE)", "b": "sets an object's state (BUILD)", "P": "refers outside (PERSID)",
    "Q": "refers outside (BINPERSID)", "\x82": "names code (EXT1)", "\x83": "names code (EXT2)",
    "\x84": "names code (EXT4)", "r": "asks for a memo larger than the file (LONG_BINPUT)",
    "\x8a": "holds an integer of more than 9 bytes (LONG1)", "\x8b": "holds a long integer (LONG4)",
    "\x96": "holds a byte array (BYTEARRAY8)", "\x85": "holds a tuple that is no pair of integers (TUPLE1)",
    "\x86": "holds a tuple that is no pair of integers (TUPLE2)", "t": "holds a tuple of any length (TUPLE)",
    "\x87": "holds a tuple that is no pair of integers (TUPLE3)",
}
_NEEDS = {0x8A: 2, 0x72: 5}  # opcode: bytes it needs at least; with fewer the file is cut off


def load(data: Data, progress: Progress) -> Any:
    """The object that the pickle describes.

    Raises:
        Refused: anything but plain data, or cut off.
    """
    check(data, lambda done: progress(done / 2))
    return build(io.BufferedReader(_Source(data, lambda done: progress((1 + done) / 2)), _CHUNK))


def build(source: io.BufferedIOBase) -> Any:
    """The object that a pickle describes that was walked before.

    Raises:
        Refused: it is damaged.
    """
    try:
        return _Unpickler(source).load()
    except Refused:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, IndexError, KeyError, AttributeError,
            OverflowError, RecursionError) as error:
        raise Refused(f"It is a damaged pickle ({type(error).__name__}: {str(error)[:80]}).") from None


def check(data: Data, progress: Progress = lambda done: None) -> None:
    """Walk the opcodes from the first to STOP.

    Raises:
        Refused: one that is not plain data, or none left before STOP.
    """
    size, position = len(data), 0
    walk = _pattern(_memo_put(size + _MEMO_SPARE)).match
    while True:
        found = walk(data, position)
        assert found is not None  # it matches the empty text
        position = found.end()
        if position >= size:
            raise Refused("It is a pickle that is cut off: its end (STOP) is missing.")
        code = data[position]
        if code == 0x2E:  # STOP
            return
        if code in _LENGTHS:
            position = _after_text(data, position, _LENGTHS[code])
            continue
        if code == 0x95:  # FRAME
            frame = int.from_bytes(data[position + 1:position + 9], "little")
            position += 9
            progress(min(position / size, 1.0))
            if position > size or position + frame > size:
                raise Refused(_cut_off(size))
            continue
        if position + _NEEDS.get(code, 0) > size or code in _FIXED or (code == 0x8A and data[position + 1] <= 9):
            raise Refused(_cut_off(size))
        meaning = _MEANING.get(chr(code), "holds something that torch does not write")
        raise Refused(f"It is a pickle that {meaning}, opcode 0x{code:02x} at byte {position:,}; only plain dicts, "
                      "lists, pairs of integers, texts and numbers are allowed.")


_LENGTHS = {0x8C: 1, 0x58: 4, 0x8D: 8}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8: bytes of their length
_FIXED = frozenset(b"hKqjJMG\x80")


def _after_text(data: Data, position: int, width: int) -> int:
    length = int.from_bytes(data[position + 1:position + 1 + width], "little")
    after = position + 1 + width + length
    if after > len(data):
        raise Refused(_cut_off(len(data)))
    if length > MAX_TEXT_BYTES:
        raise Refused(f"It holds a text of {length:,} bytes, and {MAX_TEXT_BYTES:,} are allowed.")
    return after


def _cut_off(size: int) -> str:
    return f"It is a pickle that is cut off: something in it goes on beyond its {size:,} bytes."


def _sized(code: bytes, lengths: Iterable[int]) -> bytes:
    """An opcode whose argument begins with its length in one byte."""
    return code + b"(?:" + b"|".join(re.escape(bytes([length])) + b"." * length for length in lengths) + b")"


# The commonest lengths first, as they are tried in order; longer texts are met by the loop.
_ALONE = re.escape(b"](aeusdl012N\x88\x89\x94")
_PLAIN = rb"[\}%b]*+" % _ALONE
_FRAMES = b"j....(?:j....j....j....j....)*+(?:j....)*+"  # of a stack: most of what is in a file
INTEGER = b"(?:K.|J....|M..|" + _sized(b"\x8a", (6, 5, 4, 7, 8, 3, 9, 2, 1, 0)) + b")"
_PAIR = INTEGER + b"(?:" + INTEGER + b"\x86)?+"
# A new frame may begin before the second integer; pickle's are of little more than 64 KiB, this of less than 128 KiB.
_PAIR_IN_FRAMES = INTEGER + rb"(?:(?:\x95..[\x00\x01]\x00{5})?+" + INTEGER + b"\x86)?+"
GET = b"(?:h.|j....)"
_TEXT = _sized(b"\x8c", range(64))
TEXT = _sized(b"\x8c", range(256))
_REST = rb"\x80.|%b|%b|%b|G.{8}" % (GET, _PAIR, TEXT)
OTHER = rb"(?:[%b]|%b)" % (_ALONE, _REST)  # an opcode that neither begins a dict nor numbers a memo entry, in a group
ONE = re.compile(rb"[\}%b]|%b" % (_ALONE, _REST), re.DOTALL)


@lru_cache(maxsize=16)
def _pattern(memo_put: bytes) -> re.Pattern[bytes]:
    """Opcodes with their arguments, as often as they come.

    A loop over a million events in Python would take ten times as long as reading them.
    """
    return re.compile(b"(?:%b(?:%b|[hq\x80].|%b|%b|%b|G.{8}))*+%b"
                      % (_PLAIN, _FRAMES, _PAIR_IN_FRAMES, memo_put, _TEXT, _PLAIN), re.DOTALL)


def _memo_put(limit: int) -> bytes:
    """LONG_BINPUT with an index below about ``limit``: its highest byte in use is bounded, those above are 0."""
    width = (limit.bit_length() + 7) // 8
    if width > 4:
        return b"r.{4}"
    top = limit >> 8 * (width - 1)
    return b"r.{%d}[\\x00-\\x%02x]" % (width - 1, top) + b"\x00" * (4 - width)


class _Unpickler(pickle.Unpickler):
    """Even if the walk were wrong, nothing is imported and nothing called."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise Refused(f"It is a pickle that names code ({module[:80]}.{name[:80]}), which is not allowed.")

    def persistent_load(self, pid: Any, /) -> Any:
        raise Refused("It is a pickle that refers to something outside, which is not allowed.")


class _Source(io.RawIOBase):
    """The data as a file that tells how far it was read."""

    def __init__(self, data: Data, progress: Progress) -> None:
        super().__init__()
        self._data = memoryview(data)
        self._position = 0
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any, /) -> int:
        part = self._data[self._position:self._position + len(target)]
        target[:len(part)] = part
        self._position += len(part)
        self._progress(self._position / max(len(self._data), 1))
        return len(part)
