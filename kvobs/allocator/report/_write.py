"""Putting the page together. Its policy lets only the script and the style run that are in it, known by their hash."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvobs.allocator.recording import Recording
from kvobs.allocator.replayed import Replay
from kvobs.allocator.report._data import page_data

_FOLDER = Path(__file__).resolve().parent
_SCRIPTS = ("base.js", "chart.js", "map.js", "page.js")
# Within a script element, HTML ends at "</script" and changes at "<!--"; JSON may write any letter as an escape.
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def html(recording: Recording, replays: Sequence[Replay], document: Mapping[str, Any]) -> str:
    """The report of a recording as a page. ``document`` is that of ``explain``, ``replays`` one per device."""
    return page_of(page_data(recording, replays, document))


def page_of(found: Mapping[str, Any], *, whole: bool = True) -> str:
    """The page that draws ``page_data``; without ``whole`` the timeline and the memory map alone, to stand within
    another page.
    """
    style, script = _read("page.css"), "\n".join(_read(name) for name in _SCRIPTS)
    data = json.dumps({"whole": whole} | dict(found), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    data = data.translate(_ESCAPES)
    policy = (f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
              "form-action 'none'")
    page = _read("page.html")
    for mark, text in (("@@POLICY@@", policy), ("@@STYLE@@", style), ("@@SCRIPT@@", script), ("@@DATA@@", data)):
        before, _, after = page.partition(mark)
        page = f"{before}{text}{after}"
    return page


def write_html(recording: Recording, replays: Sequence[Replay], document: Mapping[str, Any], path: Path) -> None:
    """Write the report; whoever reads ``path`` meanwhile sees the old file or the whole new one.

    Raises:
        OSError: the file cannot be written, or what is there is no regular file (a device is not to be replaced).
    """
    place = path.resolve()  # a link stays
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    page = html(recording, replays, document)
    beside = place.parent / f".kvobs-{secrets.token_hex(8)}"
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(page)
        beside.replace(place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
