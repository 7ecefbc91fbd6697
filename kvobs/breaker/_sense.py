"""From events to signals: what each device and each model's pool says of itself. Pure; one thread folds.

A scope is a device (``cuda:0``) or a model's pool (``model@device``), or the process where neither is known. What holds
for the whole process (burn rates, out-of-memory errors, what the application reports) is a signal of every scope. A
signal has the time of what it was computed from, so that a source which falls silent makes it stale.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvobs import model
from kvobs.breaker._conditions import Reading
from kvobs.breaker._signals import APPLICATION, SERVED
from kvobs.slo import Standing

SECOND = 10**9
RATE_NS, HITS_NS, ERRORS_NS = 10 * SECOND, 60 * SECOND, 60 * SECOND
FIVE_MINUTES_S, HOUR_S = 300, 3_600
MOST_SCOPES, MOST_REPORTED = 64, 64
PROCESS = "process"
_log = logging.getLogger("kvobs")
REPORTABLE = ("cpu", "hit_rate", "gateway_p99", "pool_use")


class _Grown:
    """Counts that grow, over the last ``span_ns``: what they grew by."""

    def __init__(self, span_ns: int) -> None:
        self._span_ns = span_ns
        self._seen: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=4_096)

    def add(self, t_ns: int, counts: tuple[int, ...]) -> None:
        if self._seen and t_ns < self._seen[-1][0] - self._span_ns:  # that one said that it is of the future
            self._seen.clear()
        self._seen.append((t_ns, counts))
        while len(self._seen) > 1 and self._seen[1][0] <= t_ns - self._span_ns:
            self._seen.popleft()

    def grown(self) -> tuple[float, tuple[int, ...]]:
        """Seconds between the oldest and the newest, and by how much each count grew."""
        (first_ns, first), (last_ns, last) = self._seen[0], self._seen[-1]
        return (last_ns - first_ns) / SECOND, tuple(new - old for old, new in zip(first, last, strict=True))


class _Pool:
    """One block pool's latest words."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.trouble, self.hits = _Grown(RATE_NS), _Grown(HITS_NS)
        self.readings: dict[str, Reading] = {}

    def blocks(self, told: model.Blocks) -> None:
        size = told.used + told.cached + told.free
        if size > 0 and 0 <= told.used <= size:
            self.readings["kv_utilization"] = Reading(told.used / size, told.t_ns)
        self.trouble.add(told.t_ns, (told.preemptions, told.failures))
        seconds, (preemptions, failures) = self.trouble.grown()
        if seconds > 0:
            over = max(seconds, RATE_NS / SECOND)  # a second's burst is no rate
            self.readings["preemption_rate"] = Reading(preemptions / over, told.t_ns)
            self.readings["failure_rate"] = Reading(failures / over, told.t_ns)

    def work(self, told: model.PoolWork) -> None:
        self.hits.add(told.t_ns, (told.queried_tokens, told.hit_tokens))
        _, (queried, hit) = self.hits.grown()
        if queried > 0:
            self.readings["hit_rate"] = Reading(hit / queried, told.t_ns, queried)

    def states(self, told: model.RequestStates) -> None:
        waiting = sum(number for state, _, number in told.counts if state in ("waiting", "preempted"))
        self.readings["waiting"] = Reading(float(waiting), told.t_ns)
        if told.next_verdict or not waiting:  # who waits for nothing would be served
            self.readings["pool_verdict"] = Reading(told.next_verdict or SERVED, told.t_ns)
        else:
            self.readings.pop("pool_verdict", None)


class Senses:
    """The signals of one process."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}
        self._devices: dict[str, dict[str, Reading]] = {}
        self._own: set[str] = set()  # devices of which torch itself tells what is left
        self._free: dict[str, tuple[float, int]] = {}  # bytes of devices outside of torch's allocator, and when
        self._errors_ns: deque[int] = deque(maxlen=1_024)
        self._reported: dict[str, Reading] = {}
        self._failed: set[str] = set()

    def fold(self, events: Iterable[model.Event]) -> None:
        """Take events into account."""
        for event in events:
            fold = _FOLDS.get(type(event))
            if fold is not None:
                try:
                    fold(self, event)
                except Exception as error:  # one bad sensor must not keep the others from being heard
                    self._say(type(event).__name__, error)

    def report(self, name: str, value: float, t_ns: int) -> None:
        """What the application says of itself.

        Raises:
            ValueError: the name is not one that an application may report, or there are too many.
        """
        if name not in REPORTABLE and not APPLICATION.fullmatch(name):
            raise ValueError(f"An application may report {', '.join(REPORTABLE)} and app.NAME, not {name!r}.")
        if name not in self._reported and len(self._reported) >= MOST_REPORTED:
            raise ValueError(f"An application may report {MOST_REPORTED} signals.")
        self._reported[name] = Reading(float(value), t_ns)

    def verdict(self, device: str, verdict: str, t_ns: int) -> None:
        """What would become of the next step on a device."""
        self._device(device)["verdict"] = Reading(verdict, t_ns)

    def headroom(self, device: str, share: float, t_ns: int) -> None:
        """What is left to this process on a device, as torch itself tells it; NVML does not know its fraction."""
        self._own.add(device)
        self._device(device)["headroom"] = Reading(share, t_ns)

    def fragmentation(self, device: str, rate: float, t_ns: int) -> None:
        """The article's rate, the highest of a model's caches on a device."""
        self._device(device)["fragmentation_article"] = Reading(rate, t_ns)

    def signals(self, now_ns: int, standings: Sequence[Standing]) -> dict[str, dict[str, Reading]]:
        """All signals by scope, as of now."""
        common = dict(self._reported)
        recent = sum(abs(now_ns - t_ns) < ERRORS_NS for t_ns in self._errors_ns)
        common["out_of_memory"] = Reading(float(recent), now_ns)
        rates = [min(one.burn_rates[FIVE_MINUTES_S], one.burn_rates[HOUR_S]) for one in standings
                 if FIVE_MINUTES_S in one.burn_rates and HOUR_S in one.burn_rates]
        if rates:
            common["burn_rate"] = Reading(max(rates), now_ns)
        found = {device: common | own for device, own in self._devices.items()}
        for pool in self._pools.values():
            found[pool.scope] = found.get(pool.scope, common) | pool.readings
        return found or {PROCESS: common}

    def _say(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            _log.warning("kvobs: the breaker goes on without what a %s says (%s: %s).", what, type(error).__name__,
                         error)

    # -- folding ---------------------------------------------------------------------------------------

    def _device(self, device: str) -> dict[str, Reading]:
        if device not in self._devices and len(self._devices) >= MOST_SCOPES:
            return {}
        return self._devices.setdefault(device, {})

    def _pool(self, origin: model.Origin, cache_id: int) -> _Pool:
        found = self._pools.get(cache_id)
        if found is None:
            found = _Pool(f"{origin.model}@{origin.device}")
            if len(self._pools) < MOST_SCOPES:
                self._pools[cache_id] = found
        return found

    def _fold_allocator(self, told: model.AllocatorState) -> None:
        free, free_ns = self._free.get(told.device, (0.0, 0))
        if told.device in self._free and told.device not in self._own and free + told.reserved_bytes > 0:
            taken = told.allocated_bytes / (free + told.reserved_bytes)
            self._device(told.device)["headroom"] = Reading(min(max(1 - taken, 0.0), 1.0), min(told.t_ns, free_ns))

    def _fold_poll(self, told: model.Poll) -> None:
        for name, attributes, value in told.readings:
            if (name == "kvobs.device.memory" and attributes[1] == "free"
                    and value >= 0 and (attributes[0] in self._free or len(self._free) < MOST_SCOPES)):
                self._free[attributes[0]] = value, told.t_ns

    def _fold_blocks(self, told: model.Blocks) -> None:
        self._pool(told.origin, told.cache_id).blocks(told)

    def _fold_work(self, told: model.PoolWork) -> None:
        self._pool(told.origin, told.cache_id).work(told)

    def _fold_states(self, told: model.RequestStates) -> None:
        self._pool(told.origin, told.cache_id).states(told)

    def _fold_gone(self, told: model.CacheGone) -> None:
        self._pools.pop(told.cache_id, None)

    def _fold_error(self, told: model.OutOfMemory) -> None:
        self._errors_ns.append(told.t_ns)


_FOLDS: dict[type, Callable[[Senses, Any], None]] = {
    model.AllocatorState: Senses._fold_allocator, model.Poll: Senses._fold_poll, model.Blocks: Senses._fold_blocks,
    model.PoolWork: Senses._fold_work, model.RequestStates: Senses._fold_states, model.CacheGone: Senses._fold_gone,
    model.OutOfMemory: Senses._fold_error}
