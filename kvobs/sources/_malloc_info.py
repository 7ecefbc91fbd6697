"""What glibc's ``malloc_info`` says, as numbers. Pure.

The format (glibc, malloc.c): per arena a ``heap`` with the free chunks by size (``size`` and ``unsorted``, whose
``to`` is the largest chunk met), ``total`` of type ``fast`` and ``rest``, ``system``; then the same totals over all
arenas, and ``total`` of type ``mmap``. Chunk sizes carry flags in their three lowest bits. An arena's top chunk is in
``rest`` and in no ``size``.
"""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec

_FLAGS = 7
_LIMIT_BYTES = 4 << 20  # an arena prints at most 137 sizes, so this is hundreds of arenas


class MallocInfo(msgspec.Struct, frozen=True):
    """Bytes over all arenas.

    ``largest_free_bytes`` is the largest free chunk of any arena, its header and the arena's top included; freed
    chunks that a thread keeps in its cache count as used.
    """

    arenas: int
    system_bytes: int
    free_bytes: int
    mapped_bytes: int
    largest_free_bytes: int


def parse(text: str) -> MallocInfo | None:
    """The numbers in a document of ``malloc_info``; None where it is not one of the format above."""
    if len(text) > _LIMIT_BYTES:
        return None
    try:
        root = ElementTree.fromstring(text)
        if root.tag != "malloc":
            return None
        arenas = root.findall("heap")
        free = _total(root, "fast", "size") + _total(root, "rest", "size")
        return MallocInfo(
            arenas=len(arenas), system_bytes=_system(root), free_bytes=free,
            mapped_bytes=_total(root, "mmap", "size"), largest_free_bytes=max(map(_largest, arenas), default=0))
    except (ElementTree.ParseError, ValueError, LookupError):
        return None


def _largest(arena: ElementTree.Element) -> int:
    sizes = [entry for parent in arena if parent.tag == "sizes" for entry in parent
             if entry.tag in ("size", "unsorted")]
    binned = sum(_number(entry, "total") for entry in sizes)
    top = _total(arena, "fast", "size") + _total(arena, "rest", "size") - binned
    if top < 0:
        raise ValueError("There is more in the bins than there is free.")
    return max([top & ~_FLAGS, *(_number(entry, "to") & ~_FLAGS for entry in sizes)])


def _total(parent: ElementTree.Element, kind: str, attribute: str) -> int:
    for entry in parent:  # ElementTree's own searches take several times as long
        if entry.tag == "total" and entry.get("type") == kind:
            return _number(entry, attribute)
    raise LookupError(kind)


def _system(root: ElementTree.Element) -> int:
    for entry in root:
        if entry.tag == "system" and entry.get("type") == "current":
            return _number(entry, "size")
    raise LookupError("system")


def _number(entry: ElementTree.Element, attribute: str) -> int:
    text = entry.attrib[attribute]
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise ValueError(text)
    return int(text)
