"""Numbers and texts as people read them. Pure."""

from __future__ import annotations

import re

_MARKS = re.compile(r"([!-/:-@\[-`{-~])")  # ASCII punctuation, which a backslash makes plain in Markdown
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(value: float) -> str:
    """Bytes with a binary unit: ``1.50 MiB``."""
    step = 0
    while abs(value) >= 1024 and step < len(_BINARY) - 1:
        value, step = value / 1024, step + 1
    return f"{value:,.0f} {_BINARY[step]}" if step == 0 else f"{value:,.2f} {_BINARY[step]}"


def seconds(value: float) -> str:
    """A duration with the unit that leaves one to three digits before the point."""
    for limit, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min")):
        if abs(value) < limit:
            return f"{value * scale:,.3g} {unit}"
    return f"{value / 3600:,.1f} h"


def count(value: float) -> str:
    """A count or a rate: digits enough to tell values apart, no more."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"


def share(value: float) -> str:
    """A share as per cent."""
    return f"{100 * value:.1f} %"


def raw(value: float, unit: str) -> str:
    """The very number, for whoever compares: whole ones in full, others to six digits."""
    whole = value == int(value) and abs(value) < 2**53
    return (f"{int(value):,} {unit}" if whole else f"{value:.6g} {unit}").strip()


def plain(text: str) -> str:
    """A text of the observed process for a place that reads Markdown: shown as it is, on one line.

    A session or a model may be called ``![](http://...)``, and a page must not ask anyone for that picture.
    """
    return _MARKS.sub(r"\\\1", " ".join(text.split()))
