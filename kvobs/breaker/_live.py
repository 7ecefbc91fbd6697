"""Signals that are asked for rather than told by events: what is left of devices, the verdict, the article's rate."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvobs.breaker._breaker import Breaker
from kvobs.metrics import Metrics
from kvobs.model import Availability, DeviceNow, Source

_log = logging.getLogger("kvobs")
RATE = "kvobs.kv.fragmentation.article"
NO_VERDICT = "breaker verdict {device}"


class Asked:
    """Asks the sources of a process; one thread calls."""

    def __init__(self, metrics: Metrics, share: float) -> None:
        self._metrics, self._share = metrics, share
        self._failed: set[str] = set()

    def tell(self, breaker: Breaker, sources: Iterable[Source], now_ns: int) -> list[Availability]:
        """Tell a breaker what is so now; returns where no verdict can be given, and why."""
        facts: list[Availability] = []
        for source in sources:
            for one in self._of(source, now_ns):
                breaker.device(one.device, one.headroom, one.verdict, now_ns)
                if one.verdict is not None or one.why:
                    facts.append(Availability(NO_VERDICT.format(device=one.device), one.verdict is not None, one.why))
        rates: dict[str, float] = {}
        for (_, device, _), rate in self._metrics.gauge(RATE).items():
            rates[device] = max(rates.get(device, rate), rate)
        for device, rate in rates.items():
            breaker.fragmentation(device, rate, now_ns)
        return facts

    def _of(self, source: Source, now_ns: int) -> list[DeviceNow]:
        live = getattr(source, "live", None)
        if live is None:
            return []
        try:
            return live(now_ns, self._share) or []
        except Exception as error:
            if source.name not in self._failed:
                _log.warning("kvobs: the breaker goes on without what %s says of devices (%s: %s).", source.name,
                             type(error).__name__, error)
            self._failed.add(source.name)
            return []
