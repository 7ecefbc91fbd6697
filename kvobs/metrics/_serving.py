"""Serving engines: what their pools did, who is in them, and the gauges that follow."""

from __future__ import annotations

from kvobs import model
from kvobs.metrics._alive import SECOND, who_of
from kvobs.metrics._points import Attributes, PointTable

# Counters of ``PoolWork``: metric, what follows its (model, device, cache), field.
_GROWING: tuple[tuple[str, Attributes, str], ...] = (
    ("kvobs.kv.block.touches", (), "touches"),
    ("kvobs.kv.block.evictions", ("pressure",), "evictions"),
    ("kvobs.kv.block.evictions", ("dropped",), "dropped"),
    ("kvobs.kv.admission.failures", (), "failures_waiting"),
    ("kvobs.kv.recomputed", ("preempted",), "recomputed_preempted_tokens"),
    ("kvobs.kv.recomputed", ("evicted",), "recomputed_evicted_tokens"),
    ("kvobs.prefix.queried", ("first",), "queried_tokens"),
    ("kvobs.prefix.hit", ("first",), "hit_tokens"),
    ("kvobs.prefix.queried", ("resumed",), "resumed_queried_tokens"),
    ("kvobs.prefix.hit", ("resumed",), "resumed_hit_tokens"),
)


class Serving:
    """Pools and requests that are alive."""

    def __init__(self) -> None:
        self._work: dict[int, model.PoolWork] = {}
        self._states: dict[int, model.RequestStates] = {}
        self._role: model.ProcessRole | None = None

    def work(self, work: model.PoolWork, table: PointTable) -> None:
        """A pool's counts grew, or its states changed."""
        before, who = self._work.get(work.cache_id), who_of(work.origin)
        self._work[work.cache_id] = work
        for name, more, field in _GROWING:
            grown = getattr(work, field) - (getattr(before, field) if before is not None else 0)
            if grown or before is None:
                table.add(name, (*who, *more), grown)

    def evicted(self, evictions: model.Evictions, table: PointTable) -> None:
        """Blocks were evicted."""
        who = who_of(evictions.origin)
        table.observe_counts("kvobs.kv.eviction.age", who, evictions.ages, evictions.ages_sum_ns / SECOND)
        table.observe_counts("kvobs.kv.eviction.idle", who, evictions.idles, evictions.idles_sum_ns / SECOND)

    def states(self, states: model.RequestStates) -> None:
        """Who is in the engine now."""
        self._states[states.cache_id] = states

    def role(self, role: model.ProcessRole) -> None:
        """What this process is; the latest word counts."""
        self._role = role

    def gone(self, cache_id: int) -> None:
        """A pool is gone, and its requests with it."""
        self._work.pop(cache_id, None)
        self._states.pop(cache_id, None)

    def pinned(self, cache_id: int) -> int | None:
        """Blocks of a pool that no live request holds and that are not free; None where the pool does not tell."""
        work = self._work.get(cache_id)
        return work.pinned if work is not None else None

    def refresh(self, table: PointTable, *, shown: bool) -> None:
        """Write the gauges; of what is not observed at present there are none."""
        tokens: dict[Attributes, float] = {}
        memory: dict[Attributes, float] = {}
        unexplained: dict[Attributes, float] = {}
        for work in self._work.values() if shown else ():
            who = who_of(work.origin)
            unexplained[who] = unexplained.get(who, 0) + abs(work.unexplained)  # one that lacks hides none too many
            for points, value in ((tokens, work.tail_tokens), (memory, work.tail_bytes)):
                if value is not None:
                    points[who] = points.get(who, 0) + value
        for name, points in (("kvobs.kv.tail", tokens), ("kvobs.kv.tail.usage", memory),
                             ("kvobs.kv.unexplained", unexplained)):
            table.replace(name, points)
        self._refresh_requests(table, shown)
        role = self._role
        if role is not None:
            ranks = " ".join(f"{kind}={rank}" for kind, rank in role.ranks)
            table.replace("kvobs.process.role", {(role.engine, role.role, ranks): 1})

    def _refresh_requests(self, table: PointTable, shown: bool) -> None:
        requests: dict[Attributes, float] = {}
        slots: dict[Attributes, float] = {}
        needs: dict[Attributes, float] = {}
        for states in self._states.values() if shown else ():
            name = states.origin.model
            slots[name,] = slots.get((name,), 0) + states.slots
            for state in ("running", "waiting", "preempted"):
                requests.setdefault((name, state, ""), 0)
            for state, reason, number in states.counts:
                requests[name, state, reason] = requests.get((name, state, reason), 0) + number
            if states.next_needs is not None:
                needs[name, states.next_verdict] = needs.get((name, states.next_verdict), 0) + states.next_needs
        table.replace("kvobs.requests", requests)
        table.replace("kvobs.request.slots", slots)
        table.replace("kvobs.request.next", needs)
