"""Sizes on the command line: read and written."""

from __future__ import annotations

import re

from kvobs.cli._errors import Refused

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
LARGEST = 1 << 50


def parse_size(text: str, option: str, least: int) -> int:
    """Bytes of ``512MiB``, ``1.5GiB``, ``80GB`` or a plain number.

    Raises:
        Refused: it is no size, or out of range.
    """
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise Refused(f"{option}: '{text}' is no size; write a number and a unit, for instance 512MiB or 24GiB.")
    value = int(float(found[1]) * _UNITS[found[2].lower()])
    if not least <= value <= LARGEST:
        raise Refused(f"{option}: {text} is out of range; from {least} byte{'s' * (least != 1)} to 1 PiB is allowed.")
    return value


def size_text(value: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    size, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{value:,} B" if unit == "B" else f"{size:,.2f} {unit}"
