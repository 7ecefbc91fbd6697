"""One OTLP exporter made safe: what it cannot deliver is counted, and said once instead of at every attempt."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

from opentelemetry.instrumentation.utils import suppress_instrumentation

_log = logging.getLogger("kvobs")
_here = threading.local()
_QUIETED = ("opentelemetry.exporter", "opentelemetry.sdk", "urllib3", "grpc")


class _Quiet(logging.Filter):
    """Drops what third-party loggers say on a sending thread of kvobs; other threads are not touched."""

    def filter(self, record: logging.LogRecord) -> bool:
        sender: Sender | None = getattr(_here, "sender", None)
        if sender is None:
            return True
        sender.heard = record.getMessage()
        return False


class Sender:
    """Delivers batches of one signal."""

    def __init__(self, what: str, exporter: Any, success: object, lost: Callable[[int], None]) -> None:
        self._what, self._exporter, self._success, self._lost = what, exporter, success, lost
        self._lock = threading.Lock()
        self._closed = False
        self._in_flight = 0
        self._said = False
        self._failed = False
        self.heard = ""
        self._filter = _Quiet()
        # A filter acts only on the logger that a record is made with, not on its children.
        self._loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)
                         if name.startswith(_QUIETED)]
        for logger in self._loggers:
            logger.filters.insert(0, self._filter)  # before filters that let a repeated message pass only once

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed, or the one under way has already complained (and is trying again)."""
        return self._failed or bool(self.heard)

    def send(self, batch: object, size: int) -> None:
        """Try to deliver a batch of ``size`` items; counts them as lost if that fails. Blocks, never raises."""
        with self._lock:
            closed, self._in_flight = self._closed, size
        delivered = False
        if not closed:
            _here.sender, self.heard = self, ""
            try:
                with suppress_instrumentation():
                    delivered = self._exporter.export(batch) is self._success
            except Exception as error:
                self.heard = f"{type(error).__name__}: {error}"
            finally:
                _here.sender = None
        self._failed = not delivered
        if delivered:
            self.heard = ""
        with self._lock:
            # close() may have given up on this batch, and counted it, while export() was blocked.
            size, self._in_flight = self._in_flight, 0
            closed = self._closed
        if not delivered and size:
            self._lost(size)
            self._say()
        if closed:
            self._unhush()

    def close(self) -> None:
        """Refuse further batches, count the one still in flight as lost, and shut the exporter down."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            abandoned, self._in_flight = self._in_flight, 0
        if abandoned:
            self._lost(abandoned)
            self._say()
        _here.sender = self
        try:
            bounded = "timeout_millis" in inspect.signature(self._exporter.shutdown).parameters
            self._exporter.shutdown(**({"timeout_millis": 100} if bounded else {}))
        except Exception as error:
            _log.debug("kvobs: shutting down the OTLP exporter of %s raised %r.", self._what, error)
        finally:
            _here.sender = None
        if not abandoned:
            self._unhush()  # else the thread that is still in export() does it when it returns

    def _unhush(self) -> None:
        for logger in self._loggers:
            logger.removeFilter(self._filter)

    def _say(self) -> None:
        if not self._said:
            self._said = True
            _log.warning("kvobs: %s could not be delivered over OTLP (%s); what is lost is counted as "
                         "kvobs.self.events.dropped{stage=otlp}, the process is not affected.",
                         self._what, self.heard or "no answer")
