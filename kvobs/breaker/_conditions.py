"""Conditions on signals, with hysteresis and a time that they must hold. Pure: readings and time come in as values.

A signal that is missing, stale, of the future, not a number or rests on too few samples holds nothing. One that held
and then went so is remembered as lost: what rested on it fails open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import msgspec

SECOND = 10**9


class Reading(msgspec.Struct, frozen=True, gc=False):
    """A signal's value (a number, or a word such as a verdict), when it was read (monotonic ns), and of what number of
    samples.
    """

    value: float | str
    t_ns: int
    samples: int = 1


Signals = Mapping[str, Reading]


class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """One signal against a threshold.

    It begins to hold once the value has been above ``above`` (or below ``below``, or one of ``one_of``) for ``for_s``
    without a break, and ends when the value has passed ``release`` on the other side; between the two it stays as it
    is.
    """

    signal: str
    above: float | None = None
    below: float | None = None
    one_of: tuple[str, ...] = ()
    release: float | None = None
    for_s: float = 0.0
    min_samples: int = 1
    max_age_s: float = 10.0


class All(msgspec.Struct, frozen=True):
    """Holds while all its conditions hold."""

    conditions: tuple[Condition, ...]


class AnyOf(msgspec.Struct, frozen=True):
    """Holds while one of its conditions holds."""

    conditions: tuple[Condition, ...]


Condition = Leaf | All | AnyOf


class Latch(msgspec.Struct, frozen=True, gc=False):
    """What a leaf remembers: whether it holds, since when its signal has been beyond the threshold, and whether it
    held when the signal was lost.
    """

    held: bool = False
    beyond_ns: int | None = None
    lost: bool = False


_NOTHING = Latch()
_MOST_KNOWN = 256
_known: dict[int, tuple[Condition, tuple[Leaf, ...]]] = {}  # by identity: to compare conditions costs more


def leaves(condition: Condition) -> tuple[Leaf, ...]:
    """The leaves of a condition in their order, in which their latches are kept."""
    known = _known.get(id(condition))
    if known is not None and known[0] is condition:
        return known[1]
    found = (condition,) if isinstance(condition, Leaf) else tuple(
        leaf for part in condition.conditions for leaf in leaves(part))
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[id(condition)] = condition, found
    return found


def usable(leaf: Leaf, reading: Reading | None, now_ns: int) -> str:
    """Why a reading cannot be judged, as a clause; empty where it can."""
    if reading is None:
        return f"{leaf.signal} is not told"
    age_s = (now_ns - reading.t_ns) / SECOND
    if abs(age_s) > leaf.max_age_s:  # one from the future would stay fresh until then
        return f"{leaf.signal} is {age_s:.1f} s old" if age_s > 0 else f"{leaf.signal} is {-age_s:.1f} s ahead of time"
    if reading.samples < leaf.min_samples:
        return f"{leaf.signal} rests on {reading.samples} samples"
    if isinstance(reading.value, str) != bool(leaf.one_of):
        return f"{leaf.signal} is {reading.value!r}"
    if not isinstance(reading.value, str) and not math.isfinite(reading.value):
        return f"{leaf.signal} is not finite"
    return ""


def _side(leaf: Leaf, value: float | str) -> int:
    """1 beyond the threshold, -1 released, 0 between them."""
    if isinstance(value, str):
        return 1 if value in leaf.one_of else -1
    if leaf.above is not None:
        release = leaf.above if leaf.release is None else leaf.release
        return 1 if value > leaf.above else (-1 if value <= release else 0)
    assert leaf.below is not None
    release = leaf.below if leaf.release is None else leaf.release
    return 1 if value < leaf.below else (-1 if value >= release else 0)


def follow(leaf: Leaf, latch: Latch, reading: Reading | None, now_ns: int) -> Latch:
    """What a leaf remembers after this reading."""
    if usable(leaf, reading, now_ns):
        return Latch(lost=latch.held or latch.lost)
    assert reading is not None
    side = _side(leaf, reading.value)
    if side < 0:
        return _NOTHING
    beyond = (now_ns if latch.beyond_ns is None else latch.beyond_ns) if side > 0 else None
    held = latch.held or (beyond is not None and now_ns - beyond >= leaf.for_s * SECOND)
    same = held is latch.held and beyond == latch.beyond_ns and not latch.lost
    return latch if same else Latch(held, beyond)


def holds(condition: Condition, held: Iterator[bool]) -> bool:
    """Whether a condition holds, from whether its leaves do, in their order."""
    if isinstance(condition, Leaf):
        return next(held)
    parts = [holds(part, held) for part in condition.conditions]  # all of them: each takes its leaves
    return all(parts) if isinstance(condition, All) else any(parts)
