"""Which kind of file this is, by what is in it, and who reads it. Runs in the child that ``read`` starts."""

from __future__ import annotations

import io
import re
import zlib

from kvobs.allocator.readers import _condensed, _json, _pickle, _snapshot
from kvobs.allocator.readers._limits import MAX_UNPACKED_BYTES, MIB, Refused
from kvobs.allocator.readers._pickle import Data, Progress
from kvobs.allocator.recording import Recording

_GZIP = b"\x1f\x8b"
_WITH_HEADER = 31  # zlib's word for gzip
_PIECE = 32 * MIB
_WORTH_CONDENSING = 4 * MIB  # below, what it saves is less than its patterns cost
_SQLITE = b"SQLite format 3\x00"
_BOM = b"\xef\xbb\xbf"
_JSON = re.compile(rb"\s*[\[{]")
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_ALLOWED = ("snapshots of torch's allocator (.pickle, .json), PyTorch profiler traces and memory timelines (.json), "
            "each also as .gz, and Nsight Systems exports (.sqlite)")


def parse(data: Data, name: str, progress: Progress = lambda done: None, path: str | None = None) -> Recording:
    """Read a file of any kind from its bytes; ``path`` is where SQLite can open it.

    Raises:
        ValueError: it cannot be read; one whole sentence.
    """
    if data[:2] == _GZIP:
        data = unpacked(data)
        if data[:2] == _GZIP or data[:16] == _SQLITE:
            raise Refused("It is a .gz that holds another .gz or an SQLite file; unpack it first.")
    if not len(data):
        raise Refused(f"It is empty; kvobs reads {_ALLOWED}.")
    if _PICKLE.match(data):
        return pickled(data, name, progress)
    if data[:16] == _SQLITE:
        from kvobs.allocator.readers import _nsys

        return _nsys.parse(path or bytes(data), name)
    return text(data, name, progress)


def pickled(data: Data, name: str, progress: Progress = lambda done: None) -> Recording:
    """Read a snapshot from a pickle."""
    return (condensed(data, name, progress) if len(data) >= _WORTH_CONDENSING else None) or whole(data, name, progress)


def whole(data: Data, name: str, progress: Progress = lambda done: None) -> Recording:
    """Read a snapshot from a pickle by making everything that is in it."""
    document = _pickle.load(data, lambda done: progress(done * 0.6))
    return _snapshot.recording(document, name, lambda done: progress(0.6 + done * 0.4))


def condensed(data: Data, name: str, progress: Progress = lambda done: None) -> Recording | None:
    """The same without its events; None where that cannot be done, or something is wrong, which ``whole`` will tell."""
    try:
        short = _condensed.condensed(data, lambda done: progress(done * 0.8))
        if short is None:
            return None
        document, lists = _pickle.build(io.BytesIO(short.pickle))
        return _snapshot.recording(document, name, lambda done: progress(0.8 + done * 0.2), short=(short, lists))
    except (Refused, OverflowError):  # a number of more than 64 bits is told by the whole way
        return None


def text(data: Data, name: str, progress: Progress = lambda done: None) -> Recording:
    """Read JSON, or a page made of it."""
    from kvobs.allocator.readers import _profile_json

    whole = bytes(data[len(_BOM):] if data[:len(_BOM)] == _BOM else data)
    if _profile_json.claims(whole):
        return _profile_json.parse(whole, name)
    if not _JSON.match(whole):
        raise Refused(f"It is of a kind that kvobs does not know; kvobs reads {_ALLOWED}.")
    return _json.parse(whole, name, progress)


def unpacked(data: Data) -> bytearray:
    """What a .gz holds, in one or more members; what follows the last is ignored, as gzip does.

    Raises:
        Refused: damaged, cut off, or larger than allowed.
    """
    found, position, rest = bytearray(), 0, b""
    member = zlib.decompressobj(_WITH_HEADER)
    while True:
        if not rest:
            rest = bytes(data[position:position + MIB])
            position += len(rest)
            if not rest:
                raise Refused("It is a .gz that is cut off.")
        try:
            found += member.decompress(rest, _PIECE)
        except zlib.error as error:
            raise Refused(f"It is a damaged .gz ({str(error)[:80]}).") from None
        if len(found) > MAX_UNPACKED_BYTES:
            raise Refused(f"It unpacks to more than {MAX_UNPACKED_BYTES // MIB:,} MiB, which are allowed.")
        rest = member.unconsumed_tail
        if member.eof:
            rest = member.unused_data + bytes(data[position:position + MIB])
            position += MIB
            if rest[:2] != _GZIP:
                return found
            member = zlib.decompressobj(_WITH_HEADER)
