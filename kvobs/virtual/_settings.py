"""Changing the allocator's settings while it runs.

torch's setter takes a whole string and does not merge: a key that is left out goes back to its default. So one key is
changed in the string in effect, the whole is sent, and what is in effect afterwards is compared.
"""

from __future__ import annotations

import re

from kvobs.virtual._devices import Unavailable

_PAIR = re.compile(r"\s*([A-Za-z_0-9]+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+?)\s*(?:,|$)")


def pairs(settings: str) -> dict[str, str]:
    """Keys and values of a settings string such as ``"max_split_size_mb:64,expandable_segments:True"``.

    Raises:
        Unavailable: it is none.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(settings):
        match = _PAIR.match(settings, position)
        if match is None:
            raise Unavailable(f"{settings!r} is no string of allocator settings; key:value pairs with commas between "
                              "them are, such as max_split_size_mb:64,expandable_segments:True.")
        found[match[1]] = match[2]
        position = match.end()
    return found


def merged(effective: str, change: str) -> str:
    """The settings string with the keys of ``change`` replaced or added.

    Raises:
        Unavailable: one of them is no settings string.
    """
    return ",".join(f"{key}:{value}" for key, value in (pairs(effective) | pairs(change)).items())


def change_settings(change: str) -> str:
    """Change some of the settings of torch's device allocator; what is allocated stays. Returns the string that was in
    effect, to be given to ``torch._C._accelerator_setAllocatorSettings`` to restore it exactly.

    Raises:
        Unavailable: it is no settings string, or torch refuses it; nothing has changed then.
    """
    import torch

    before = str(torch._C._accelerator_getAllocatorSettings())
    wanted = merged(before, change)
    try:
        torch._C._accelerator_setAllocatorSettings(wanted)
    except (RuntimeError, ValueError) as error:
        torch._C._accelerator_setAllocatorSettings(before)
        raise Unavailable(f"torch refuses the settings {wanted!r}: {str(error).splitlines()[0]}") from None
    if torch._C._accelerator_getAllocatorSettings() != wanted:
        raise Unavailable(f"The settings {wanted!r} were sent, and others are in effect.")
    return before
