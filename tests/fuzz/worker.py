"""A limited process that reads damaged inputs in a loop and counts how each ended. Started by ``tests.fuzz.runner``.

Arguments: format, first number, how many, bytes of address space, the file to leave the present input's number in.
On its standard output: one JSON line per thousand inputs.
"""

from __future__ import annotations

import gc
import json
import mmap
import resource
import struct
import sys
import tempfile
import time
from pathlib import Path

_REPORT = 1000


def main() -> None:
    """Loop; a crash of this process is found out by whoever reads its output."""
    from kvobs.allocator.readers import _wire
    from tests.fuzz import formats

    kind, first, count = formats.by_name(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for what, value in ((resource.RLIMIT_AS, int(sys.argv[4])), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (value, value))
    with open(sys.argv[5], "r+b") as note, tempfile.TemporaryDirectory() as folder:
        present = mmap.mmap(note.fileno(), 8)
        scratch = str(Path(folder) / "input")
        counts = {"accepted": 0, "refused": 0, "limited": 0}
        crashes: list[tuple[int, str]] = []
        slowest, slowest_number = 0.0, first
        for number in range(first, first + count):
            present[:] = struct.pack("<q", number)
            data = formats.damaged(kind, number)
            begun = time.process_time()
            try:
                found = kind.read(data, scratch)
                if _wire.unpack(_wire.pack(found), found.file) != found:
                    raise AssertionError("the recording changes on its way")
                counts["accepted"] += 1
            except MemoryError:
                counts["limited"] += 1
            except ValueError as error:
                counts["refused"] += 1
                if not is_sentence(str(error)):
                    crashes.append((number, f"no sentence: {error}"))
            except Exception as error:
                crashes.append((number, f"{type(error).__name__}: {error}"[:300]))
            spent = time.process_time() - begun
            if spent > slowest:
                slowest, slowest_number = spent, number
            if (number - first + 1) % _REPORT == 0 or number == first + count - 1:
                gc.collect()
                print(json.dumps({"done": number - first + 1, **counts, "crashes": crashes, "slowest": slowest,
                                  "slowest_number": slowest_number,
                                  "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


def is_sentence(text: str) -> bool:
    """Whether a refusal is one whole line that begins and ends like a sentence, and is short."""
    return (text[:1].isupper() or text[:1].isdigit()) and text.endswith(".") and text.isprintable() and len(text) < 800


if __name__ == "__main__":
    main()
