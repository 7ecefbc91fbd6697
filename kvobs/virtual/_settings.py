"""Changing the allocator's settings while it runs.

torch's setter takes a whole string and does not merge: a key that is left out goes back to its default. So one key is
changed in the string in effect, the whole is sent, and what is in effect afterwards is compared.
"""

from __future__ import annotations

import re

from kvobs.allocator.settings import MIB, Settings, is_option, known
from kvobs.virtual._devices import Unavailable

_SHARE = "per_process_memory_fraction"
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
    """Change some of the settings of torch's device allocator; what is allocated stays. Returns the string that
    restores what was in effect, to be given to ``torch._C._accelerator_setAllocatorSettings``.

    Raises:
        Unavailable: it is no settings string, torch knows no such option or refuses it; nothing has changed then.
    """
    import torch

    unknown = next((key for key in pairs(change) if not is_option(key)), None)
    if unknown is not None:
        raise Unavailable(f"torch's allocator has no option {unknown!r}.")
    effective = str(torch._C._accelerator_getAllocatorSettings())
    wanted, restoring = merged(effective, change), _restoring(effective, change)
    try:
        torch._C._accelerator_setAllocatorSettings(wanted)
    except (RuntimeError, ValueError, IndexError) as error:
        torch._C._accelerator_setAllocatorSettings(restoring)
        why = str(error).splitlines()[0].rstrip(" .")
        raise Unavailable(f"torch refuses the settings {wanted!r}: {why}.") from None
    if torch._C._accelerator_getAllocatorSettings() != wanted:
        raise Unavailable(f"The settings {wanted!r} were sent, and others are in effect.")
    return restoring


def _restoring(effective: str, change: str) -> str:
    """``effective``, with what else it takes to undo ``change``: torch 2.13 lets two options outlive a text without
    them.
    """
    now = in_effect()
    lasting = {"expandable_segments": str(now.expandable_segments),
               "large_segment_size_mb": str(now.large_segment_size // MIB)}
    said, changed = pairs(effective), pairs(change)
    return merged(effective, ",".join(f"{key}:{value}" for key, value in lasting.items()
                                      if key in changed and key not in said)) or effective


def share_of(settings: str) -> float | None:
    """The ``per_process_memory_fraction`` of a settings string, which torch reads for CUDA alone; None without one.

    Raises:
        Unavailable: it is no settings string, or the fraction is out of range.
    """
    told = pairs(settings).get(_SHARE)
    try:
        return None if told is None else Settings().with_option(_SHARE, told).memory_fraction
    except ValueError as error:
        raise Unavailable(f"{error}.") from None


def in_effect() -> Settings:
    """The settings that the virtual devices have; before there are any, those that the text in effect gives."""
    import torch

    from kvobs.virtual import _setup

    library = _setup._library_of_process
    return known(str(torch._C._accelerator_getAllocatorSettings())) if library is None else library.settings_of(0)
