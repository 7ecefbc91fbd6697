"""The entry point ``vllm.stat_logger_plugins``: what vLLM tells its loggers, kept for kvobs's next sample.

Imported only where vLLM is. It stands beside vLLM's own loggers (``StatLoggerManager`` adds a Prometheus logger
unless a plugin is one). One thing vLLM decides by its presence: ``--disable-log-stats`` does not switch the
statistics off any more where any plugin wants them.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase  # type: ignore[import-not-found, unused-ignore]

from kvobs.sources.vllm._statistics import Reading, Statistics

_log = logging.getLogger("kvobs")
_alive: weakref.WeakSet[ReportedStats] = weakref.WeakSet()


def readings() -> list[Reading]:
    """What the engines of this process have said of themselves so far."""
    return [reading for logger in list(_alive) for reading in logger.statistics.readings()]


class ReportedStats(StatLoggerBase):  # type: ignore[misc, unused-ignore]
    """One per engine. Nothing here raises into the engine: what fails is not looked at any more."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._broken = False
        name = getattr(getattr(vllm_config, "model_config", None), "served_model_name", None)
        self.statistics = Statistics(str(name or "unknown"), engine_index)
        _alive.add(self)

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
        """Called by vLLM with the statistics of each batch of outputs."""
        if self._broken:
            return
        try:
            self.statistics.record(scheduler_stats, iteration_stats)
        except Exception as error:
            self._broken = True
            _alive.discard(self)
            _log.warning("kvobs: what vLLM says of itself could not be read (%s: %s) and is not shown any more; the "
                         "process is not affected.", type(error).__name__, error)

    def log_engine_initialized(self) -> None:
        """Called by vLLM once the engine has its pool."""
        cache = getattr(self._config, "cache_config", None)
        self.statistics.blocks(getattr(cache, "num_gpu_blocks", None))
