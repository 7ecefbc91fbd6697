"""Which events were good: folds what happened into good and bad, objective by objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from kvobs import model
from kvobs.config import ALLOCATION_LATENCY, LATENCY_BOUNDS_NS, OUT_OF_MEMORY, PREEMPTIONS, TPOT, TTFT, Objective
from kvobs.slo._burn import ALERTS, SECOND, Alert, History, budget_left, burn_rate, firing, refusal

# What happened in a window may be told this much later, by a source that is polled once a second.
GRACE_NS = 5 * SECOND
MOST_KEYS = 64  # of open windows: further devices are judged together


class Standing(msgspec.Struct, frozen=True):
    """How an objective stands: counts since the beginning, rates by window in seconds, and its alerts."""

    objective: Objective
    good: int
    events: int
    budget_left: float | None
    burn_rates: dict[int, float]
    alerts: dict[Alert, bool]


class _Turns:
    """Of turns: each that had a first token, or waited for it for too long, is an event."""

    def __init__(self, objective: Objective) -> None:
        self._first = objective.signal == TTFT
        self._limit = objective.at_most

    def fold(self, event: model.Turn) -> tuple[int, int]:
        took = event.ttft_ns if self._first else event.tpot_ns
        if took is not None:
            return int(took <= self._limit), 1
        waited_in_vain = self._first and not event.new_tokens and event.t_ns - event.start_ns > self._limit
        return 0, int(waited_in_vain and event.outcome != "ok")


class _Windows:
    """Of windows: each in which something could be judged is an event once it is over.

    ``within`` holds per window and key (a device, or nothing) how many were good and how many there were. A late
    report counts in the oldest window that is open.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._width = objective.window_s * SECOND
        self._within: dict[tuple[int, str], list[int]] = {}
        self._closed = -1  # the last window that was judged
        self._preemptions: dict[int, int] = {}

    def _count(self, t_ns: int, good: int, events: int, key: str = "") -> None:
        if not events:
            return
        window = max(t_ns // self._width, self._closed + 1)
        if (window, key) not in self._within and len(self._within) >= MOST_KEYS:
            key = "other"
        found = self._within.setdefault((window, key), [0, 0])
        found[0] += good
        found[1] += events

    def over(self, now_ns: int) -> tuple[int, int]:
        """Judge the windows that are over: how many were good, of how many."""
        last = (now_ns - GRACE_NS) // self._width - 1
        if last <= self._closed:
            return 0, 0
        self._closed = last
        over = [self._within.pop(key) for key in list(self._within) if key[0] <= last]
        return sum(self._good(*counts) for counts in over), len(over)

    def _good(self, good: int, events: int) -> bool:
        if self._objective.signal == ALLOCATION_LATENCY:
            return good >= self._objective.quantile * events
        return events - good <= self._objective.at_most

    def allocation(self, event: model.Allocation) -> None:
        self._count(event.t_ns, event.latency_ns <= self._objective.at_most, 1, event.device)

    def latencies(self, event: model.AllocationLatencies) -> None:
        within = LATENCY_BOUNDS_NS.index(self._objective.at_most) + 1
        self._count(event.t_ns, sum(event.counts[:within]), sum(event.counts), event.device)

    def worked(self, event: Any) -> None:
        self._count(event.t_ns, 1, 1)

    def out_of_memory(self, event: model.OutOfMemory) -> None:
        self._count(event.t_ns, 0, 1)

    def blocks(self, event: model.Blocks) -> None:
        more = event.preemptions - self._preemptions.get(event.cache_id, 0)
        self._preemptions[event.cache_id] = event.preemptions
        self._count(event.t_ns, 0, max(0, more))

    def gone(self, event: model.CacheGone) -> None:
        self._preemptions.pop(event.cache_id, None)


class Ledger:
    """Good and bad events of every objective since the process began; one thread folds."""

    def __init__(self, objectives: Sequence[Objective], now_ns: int) -> None:
        self._objectives = tuple(objectives)
        self._histories = {one.name: History(now_ns) for one in objectives}
        self._alerts = {one.name: [alert for alert in ALERTS if not refusal(one, alert)] for one in objectives}
        self._windows: dict[str, _Windows] = {}
        self._folds: dict[type, list[Callable[[Any], None]]] = {}
        for objective in objectives:
            if objective.signal in (TTFT, TPOT):
                self._hear(model.Turn, self._turn(_Turns(objective), self._histories[objective.name]))
                continue
            windows = self._windows[objective.name] = _Windows(objective)
            if objective.signal == ALLOCATION_LATENCY:
                self._hear(model.Allocation, windows.allocation)
                self._hear(model.AllocationLatencies, windows.latencies)
                continue
            self._hear(model.Step, windows.worked)
            if objective.signal == PREEMPTIONS:
                self._hear(model.Blocks, windows.blocks)
                self._hear(model.CacheGone, windows.gone)
            elif objective.signal == OUT_OF_MEMORY:
                self._hear(model.Turn, windows.worked)
                self._hear(model.OutOfMemory, windows.out_of_memory)

    def _hear(self, kind: type, fold: Callable[[Any], None]) -> None:
        self._folds.setdefault(kind, []).append(fold)

    @staticmethod
    def _turn(turns: _Turns, history: History) -> Callable[[model.Turn], None]:
        return lambda event: history.add(*turns.fold(event))

    def fold(self, events: Iterable[model.Event]) -> None:
        """Take events into account."""
        folds = self._folds
        for event in events:
            for fold in folds.get(type(event), ()):
                fold(event)

    def standings(self, now_ns: int) -> list[Standing]:
        """Judge the windows that are over, and how every objective stands now."""
        return [self._standing(objective, now_ns) for objective in self._objectives]

    def _standing(self, objective: Objective, now_ns: int) -> Standing:
        history, windows = self._histories[objective.name], self._windows.get(objective.name)
        if windows is not None:
            history.add(*windows.over(now_ns))
        history.keep(now_ns)
        alerts = self._alerts[objective.name]
        rates = {seconds: burn_rate(history, objective, now_ns, seconds)
                 for alert in alerts for seconds in (alert.short_s, alert.long_s)}
        return Standing(
            objective, history.all - history.bad, history.all, budget_left(history, objective, now_ns),
            {seconds: rate for seconds, rate in sorted(rates.items()) if rate is not None},
            {alert: firing(history, objective, now_ns, alert) for alert in alerts})
