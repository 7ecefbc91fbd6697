"""What a session may still have at a level of the breaker, by its priority."""

from __future__ import annotations

import itertools
import math
from typing import Protocol

import msgspec

from kvobs.sessions import PRIORITIES, Priority


class Limits(msgspec.Struct, frozen=True, gc=False):
    """What a request may have: whether it is let in, new tokens and tokens of history at most (None: no limit)."""

    admit: bool = True
    max_new_tokens: int | None = None
    history_tokens: int | None = None


UNLIMITED = Limits()


class SessionPolicy(Protocol):
    """Decides what a session may have. Pure; called when a level changes, not per request."""

    def limits(self, session: str, priority: Priority, level: int) -> Limits:
        """The limits of a session (empty: any session of that priority) at a level from 0 to 3."""
        ...


class ByPriority(msgspec.Struct, frozen=True, kw_only=True):
    """Limits by priority alone, from ``from_level`` on; below it nobody has any.

    By default level 3 refuses sheddable sessions, halves what the article's S13 gives at most (512 new tokens) for
    normal ones, and leaves critical ones alone.

    Raises:
        ValueError: a more important priority would have tighter limits than a less important one.
    """

    critical: Limits = UNLIMITED
    normal: Limits = Limits(max_new_tokens=256, history_tokens=4_096)
    sheddable: Limits = Limits(admit=False, max_new_tokens=64, history_tokens=1_024)
    from_level: int = 3

    def __post_init__(self) -> None:
        for above, below in itertools.pairwise(PRIORITIES):
            if _tighter(getattr(self, above), getattr(self, below)):
                raise ValueError(f"The limits of {above} sessions are tighter than those of {below} ones, which are "
                                 "degraded first.")

    def limits(self, session: str, priority: Priority, level: int) -> Limits:
        """The limits of any session of that priority."""
        if level < self.from_level:
            return UNLIMITED
        found: Limits = getattr(self, priority)
        return found


def by_priority(policy: SessionPolicy, level: int) -> tuple[Limits, Limits, Limits]:
    """The limits at a level of sessions that have no name, in the order of ``PRIORITIES``."""
    critical, normal, sheddable = (policy.limits("", priority, level) for priority in PRIORITIES)
    return critical, normal, sheddable


def _tighter(one: Limits, other: Limits) -> bool:
    if not other.admit:
        return False
    return not one.admit or _amount(one.max_new_tokens) < _amount(other.max_new_tokens) or (
        _amount(one.history_tokens) < _amount(other.history_tokens))


def _amount(limit: int | None) -> float:
    return math.inf if limit is None else limit
