"""Which of the profilers' text files a file is."""

from __future__ import annotations

import re

from kvobs.allocator.readers import _kineto, _timeline
from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.recording import Recording

_ROWS = re.compile(rb"\s*\[\s*\[")
_EVENTS = re.compile(rb"\s*\[\s*\{")
_PAGE = re.compile(rb"\s*<(?:!doctype|html|head|meta|\?xml)", re.IGNORECASE)


def claims(data: bytes) -> bool:
    """Whether this is a trace, a memory timeline, or a page that one of them was made into."""
    if _ROWS.match(data) or _PAGE.match(data):
        return True
    return b'"traceEvents"' in data or (_EVENTS.match(data) is not None and b'"ph"' in data)


def parse(data: bytes, name: str) -> Recording:
    """Read a trace or a memory timeline.

    Raises:
        Refused: with one sentence that says what is wrong and what is allowed.
    """
    if _PAGE.match(data):
        if b"GPU Memory Timeline" in data[:4096]:
            raise Refused("The HTML form of a memory timeline holds only a picture; export it again to a path that "
                          "ends in .raw.json.gz or .json.gz.")
        raise Refused("This is an HTML page; kvobs reads snapshots, traces, memory timelines (.json, .json.gz) and "
                      "Nsight Systems exports (.sqlite).")
    return _timeline.parse(data, name) if _ROWS.match(data) else _kineto.parse(data, name)
