"""The process that reads a file: limited, without influence on the one that asked, and gone afterwards.

It is told its limits and the file's name; the file is its standard input. On its standard output it writes messages of
one letter, eight bytes of length, and a body: P, how far it is; R, the recording; E, why there is none.
"""

from __future__ import annotations

import errno
import gc
import mmap
import os
import struct
import sys
from collections.abc import Callable

from kvobs.allocator.readers import _limits

PROGRESS, RESULT, ERROR = b"P", b"R", b"E"
HEADER = struct.Struct("<cQ")
OUT_OF_MEMORY = 77  # the status of one that reached its limit; no memory is needed to tell it
_STEP = 0.01


def main(arguments: list[str]) -> None:
    """Read standard input under these limits, and leave without looking back."""
    from kvobs.allocator.readers import _formats, _wire  # before the limits, which may be too tight for it

    memory, cpu, name = int(arguments[0]), int(arguments[1]), arguments[2]
    output = os.dup(1)
    os.dup2(2, 1)  # nothing that prints can end up among the messages
    _limits.apply(memory, cpu)
    gc.disable()  # millions of objects that live to the end
    try:
        recording = _formats.parse(_data(), name, _progress(output), "/proc/self/fd/0")
        kind, body = RESULT, _wire.pack(recording)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except ValueError as error:
        kind, body = ERROR, str(error).encode("utf-8", "replace")
    except Exception as error:  # whatever a file provokes that no reader foresaw is an answer too
        kind, body = ERROR, f"kvobs could not make sense of it ({type(error).__name__}).".encode()
    _send(output, kind, body)
    os._exit(0)  # without taking apart what the file made


def _data() -> bytes | mmap.mmap:
    if not os.fstat(0).st_size:
        return b""
    try:
        return mmap.mmap(0, 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise MemoryError if error.errno == errno.ENOMEM else error from None


def _progress(output: int) -> Callable[[float], None]:
    last = -1.0

    def progress(done: float) -> None:
        nonlocal last
        if done - last >= _STEP:
            last = done
            _send(output, PROGRESS, struct.pack("<d", done))

    return progress


def _send(output: int, kind: bytes, body: bytes) -> None:
    for part in (HEADER.pack(kind, len(body)), body):  # not as one: a copy of the largest might pass the limit
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(output, rest):]


if __name__ == "__main__":
    main(sys.argv[1:])
