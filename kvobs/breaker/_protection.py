"""The breaker of an observed process as its configuration has it: made, fed, commanded, told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvobs import model
from kvobs.breaker._breaker import Breaker
from kvobs.breaker._commands import take
from kvobs.breaker._policy import PolicyError, load_policy
from kvobs.config import Config
from kvobs.metrics import Metrics
from kvobs.slo import Standing

_log = logging.getLogger("kvobs")
OFF = "off"


class Protection:
    """``breaker`` is None where it is off or its policy was refused; then ``facts`` says why."""

    def __init__(self, config: Config, process_id: str, metrics: Metrics,
                 sources: Callable[[], Sequence[model.Source]]) -> None:
        self._store, self._process_id, self._metrics = config.store, process_id, metrics
        self.breaker: Breaker | None = None
        self.facts: list[model.Availability] = []
        if config.breaker == OFF:
            return
        try:
            self.breaker = Breaker(load_policy(config.breaker_policy), config.breaker, lambda: [
                one for source in sources() for one in getattr(source, "actuators", ())])
        except PolicyError as error:
            self.facts.append(model.Availability("breaker", False, str(error)))
            _log.warning("kvobs: there is no breaker: %s", error)

    def follow(self, now_ns: int, events: list[model.Event], standings: Sequence[Standing], due: bool) -> None:
        """Let the breaker decide on these events; what it decided is added to them. ``due`` about once a second."""
        breaker = self.breaker
        if breaker is None:
            return
        if due and self._store is not None:
            breaker.obey(take(self._store, self._process_id))
        events += breaker.follow(now_ns, events, standings)
        for scope, level in breaker.levels().items():
            self._metrics.set("kvobs.breaker.level", (scope, breaker.mode), level)

    def report(self, name: str, value: float, now_ns: int) -> None:
        """Take a signal of the application; raises ValueError for a name that it may not report."""
        if self.breaker is not None:
            self.breaker.report(name, value, now_ns)

    def stop(self, now_ns: int) -> None:
        """Undo what is applied."""
        if self.breaker is not None:
            self.breaker.stop(now_ns)
