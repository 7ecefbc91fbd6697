"""The garbage-collection threshold of torch's allocator, set by how fragmented memory is and put back exactly.

The formula is the reference article's (S9): 0.75 up to a rate of 0.683, above it 0.75 + (rate - 0.683) * 0.8, which
reaches 1.0036 and is clamped to 0.99, since torch takes values inside (0, 1) only. The setter of torch does not merge:
the whole text in effect is sent with one key changed, and what is in effect afterwards is compared.
"""

from __future__ import annotations

from typing import Any

KEY = "garbage_collection_threshold"
KNEE, LOW, SLOPE, MOST = 0.683, 0.75, 0.8, 0.99


class SettingsRefused(Exception):
    """The allocator's settings are as before; ``str()`` is a whole sentence."""


def threshold(rate: float) -> float:
    """The threshold for a fragmentation rate by the article's definition (below 1; negative where most is free)."""
    return min(MOST, LOW + max(0.0, rate - KNEE) * SLOPE)


def with_key(text: str, value: str | None) -> str:
    """The settings text with the threshold replaced or added (None: left out); all else stays, to the letter."""
    items = [item for item in _items(text) if item.partition(":")[0].strip() != KEY]
    return ",".join([*items, *([f"{KEY}:{value}"] if value is not None else [])])


def value_in(text: str) -> str | None:
    """The threshold that a settings text names, to the letter."""
    found = [item.partition(":")[2].strip() for item in _items(text) if item.partition(":")[0].strip() == KEY]
    return found[-1] if found else None


def change(module: Any, text: str) -> None:
    """Make ``text`` the settings in effect (``module`` is ``torch._C``).

    Raises:
        SettingsRefused: torch cannot change settings while it runs, or refused; what was in effect is again.
    """
    read = getattr(module, "_accelerator_getAllocatorSettings", None)
    write = getattr(module, "_accelerator_setAllocatorSettings", None)
    if read is None or write is None:
        raise SettingsRefused("This torch cannot change its allocator's settings while it runs.")
    before = str(read())
    try:
        write(text)
        if str(read()) == text:
            return
        why = "others are in effect"
    except (RuntimeError, ValueError, IndexError) as error:
        why = str(error).splitlines()[0].rstrip(" .") if str(error) else type(error).__name__
    write(before)
    raise SettingsRefused(f"The allocator's settings {text!r} were refused ({why}); they are as before.")


def _items(text: str) -> list[str]:
    """The items between commas that stand in no brackets, as they are written."""
    found, depth, start = [], 0, 0
    for at, character in enumerate(text + ","):
        depth = max(0, depth + (character == "[") - (character == "]"))
        if character == "," and not depth:
            found.append(text[start:at])
            start = at + 1
    return [item for item in found if item.strip()]
