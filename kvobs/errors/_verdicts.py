"""What kvobs found when an accelerator's allocator ran out of memory, until the error that follows has been classified.

The allocator tells its observer before it raises, so there is no error yet to write the verdict on. The error names the
device and the bytes: by these it is found again, whatever thread it surfaces in.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import NamedTuple

from kvobs.errors._classes import KV_CAPACITY, KV_FRAGMENTED, OUT_OF_MEMORY

KEPT, LIFE_NS = 32, 60_000_000_000
_ASKED = re.compile(r"tried to allocate (\d+(?:\.\d+)?) (bytes|[KMGT]iB).*?\b(?:GPU|device|vgpu:?|cuda:?) ?(\d+)\b",
                    re.IGNORECASE | re.DOTALL)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SEGMENT = 20 << 20  # CUDA's allocator tells the segment that it asked the device for: at most this for a small request
_PAGE = 2 << 20  # and a multiple of this for a large one
CLASSES = {"CAPACITY": KV_CAPACITY, "FRAGMENTED": KV_FRAGMENTED, "WRONG_POOL": KV_FRAGMENTED, "WAIT": KV_FRAGMENTED}


class _Note(NamedTuple):
    t_ns: int
    device: int
    requested: int
    verdict: str | None


_notes: deque[_Note] = deque(maxlen=KEPT)


def note(device: int, requested: int, verdict: str | None, t_ns: int | None = None) -> None:
    """An allocation of ``requested`` bytes failed on the accelerator of this number; None: nobody judged why."""
    _notes.append(_Note(time.monotonic_ns() if t_ns is None else t_ns, device, requested, verdict))


def forget() -> None:
    """Forget all: for tests, and a forked child."""
    _notes.clear()


def of_message(message: str, now_ns: int | None = None) -> str:
    """The class of an out-of-memory error with this text: by the newest verdict on a request like the one it names."""
    found = _ASKED.search(message)
    if found is None:
        return OUT_OF_MEMORY
    unit = _UNITS[found[2].lower()]
    asked, device = float(found[1]) * unit, int(found[3])
    slack = 0.005 * unit  # the text has two decimals
    now = time.monotonic_ns() if now_ns is None else now_ns
    for one in reversed(tuple(_notes)):
        if now - one.t_ns > LIFE_NS:
            break
        most = max(_SEGMENT, asked + slack + _PAGE)
        if one.device == device and asked - slack <= one.requested <= most:
            return CLASSES.get(one.verdict or "", OUT_OF_MEMORY)
    return OUT_OF_MEMORY
