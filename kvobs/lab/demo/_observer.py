"""kvobs in the demo's process: started with its default settings, and asked for each turn through its own store."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvobs import config as configuration
from kvobs import runtime
from kvobs.lab.demo._errors import DemoError
from kvobs.model import Migration, Turn
from kvobs.store import StoreError, StoreReader

if TYPE_CHECKING:
    from kvobs.allocator.forecast import NextStep
    from kvobs.store import Point

_ATTEMPTS, _PAUSE_S = 100, 0.1
_MARGIN_NS = 3_600_000_000_000  # the wall clock may have been set since the store began
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Observer:
    """The running kvobs. A runtime that was there before is used and left running."""

    def __init__(self, *, deep: bool = False, overhead_percent: float | None = None) -> None:
        """Start kvobs; what is given here holds instead of the setting, where no runtime was there.

        Raises:
            kvobs.config.ConfigError: a setting was refused.
            DemoError: kvobs is switched off.
        """
        found = runtime.current()
        config = found.config if found is not None else configuration.load()
        if not config.enabled:
            raise DemoError("The demo shows what kvobs observes, and the setting enabled switches it off.")
        self._kept = config.store is not None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if config.store is None:
            if found is not None:
                raise DemoError("The demo reads the store, and this process is already observed without one.")
            self._scratch = tempfile.TemporaryDirectory(prefix="kvobs-demo-")
            config = msgspec.structs.replace(config, store=Path(self._scratch.name))
        if deep and found is None:
            config = msgspec.structs.replace(config, deep=True)
        if overhead_percent is not None and found is None:
            config = msgspec.structs.replace(config, overhead_percent=overhead_percent)
        assert config.store is not None
        self.directory: Path = config.store
        self._own = found is None
        self._runtime = runtime.start(config)
        self._since_wall_ns = time.time_ns() - _MARGIN_NS
        self._seen = len(self._recorded())
        self._moves = len(self._moved())

    def turn(self) -> Turn:
        """The turn that has just ended, as it was recorded.

        Raises:
            DemoError: it did not reach the store within about 10 s.
        """
        for _ in range(_ATTEMPTS):
            self._runtime.tick(sample=True)
            if len(recorded := self._recorded()) > self._seen:
                self._seen += 1
                return recorded[self._seen - 1]
            threading.Event().wait(_PAUSE_S)
        raise DemoError(f"kvobs recorded no turn in the store in {self.directory}; its log says why.", 1)

    def migrations(self) -> list[Migration]:
        """What has moved from device to device since the last call, as it was recorded by the last ``turn``."""
        found, self._moves = (moved := self._moved())[self._moves:], len(moved)
        return found

    def verdict(self, device: str) -> NextStep:
        """What would become of the next step of all live caches on a device; estimated."""
        return self._runtime.verdict(device)[0]

    def usage(self, device: str) -> dict[str, int]:
        """Bytes of the allocator of a device by state, as the last ``turn`` recorded them; nothing where unknown."""
        return {point.attributes["state"]: int(point.value) for point in self.points("kvobs.allocator.usage")
                if point.attributes["device"] == device}

    def points(self, metric: str) -> list[Point]:
        """The points of a metric that were recorded last: those of its latest second."""
        try:
            found = self.reader().points(metric, since_wall_ns=self._since_wall_ns)
        except StoreError:
            return []
        return [point for point in found if point.wall_ns == found[-1].wall_ns]

    def reader(self) -> StoreReader:
        """What this process has recorded.

        Raises:
            StoreError: nothing so far.
        """
        return StoreReader(self.directory, processes=[self.process])

    def record(self) -> None:
        """Bring everything that has happened so far to the store."""
        self._runtime.flush()

    def _recorded(self) -> list[Turn]:
        try:
            return [stored.record for stored in self.reader().turns(since_wall_ns=self._since_wall_ns)]
        except StoreError:
            return []

    def _moved(self) -> list[Migration]:
        try:
            return [stored.record for stored in self.reader().migrations(since_wall_ns=self._since_wall_ns)]
        except StoreError:
            return []

    @property
    def process(self) -> str:
        """The id under which this process writes its store."""
        return self._runtime.process_id

    @property
    def metrics(self) -> str | None:
        """The address of the metrics page, while the demo runs."""
        return self._runtime.endpoint

    def places(self) -> list[str]:
        """Where metrics, traces and the store are, one sentence each."""
        metrics = (f"Metrics: {self.metrics} served them while the demo ran." if self.metrics is not None
                   else "Metrics: no page was served (see the setting prometheus and kvobs doctor).")
        store = (f"Store: {self.directory} (process {self._runtime.process_id}); read it with: "
                 f"kvobs export --parquet OUT {self.directory}" if self._kept
                 else "Store: off, as configured; the demo used one of its own and removed it.")
        if self._kept:
            store += f"; look at it with: kvobs view {self.directory}"
        return [metrics, f"Traces: {self._traces()}", store]

    def _traces(self) -> str:
        pushed = self._runtime.otel.availability()
        if not pushed.available:
            kept = "The store holds the times and ids of each turn. " if self._kept else ""
            return f"{kept}{pushed.reason}"
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
        return (f"one span per turn was pushed over OTLP to {endpoint}." if endpoint is not None
                else "one span per turn was handed to the OpenTelemetry SDK, whose endpoint is its default or the "
                     "application's.")

    def close(self) -> None:
        """Flush everything and stop what was started here."""
        if self._own:
            runtime.stop()
        if self._scratch is not None:
            self._scratch.cleanup()
