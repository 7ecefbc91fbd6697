"""Composition root: configuration to sources, drain thread, exporters and store; start, stop, fork.

Everything here may lose telemetry (counted), never a request: no call raises into the host, no lock is held
while an exporter or the disk is slow.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvobs import config as configuration
from kvobs.allocator.forecast import Forecast, absent
from kvobs.allocator.memory_map import Held
from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.discovery import Targets
from kvobs.exporters import OtelExporter, PrometheusExporter
from kvobs.flight import FlightRecorder
from kvobs.guard import OBSERVING, PASSING, Guard
from kvobs.metrics import Attributes, Metrics, Objectives, Value
from kvobs.model import Availability, CacheGone, Event, ProcessRole, Source
from kvobs.pace import SECOND_NS, Pace
from kvobs.sources import Wiring, factories
from kvobs.store import StoreWriter, watched

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from kvobs.allocator.forecast import NextStep
    from kvobs.breaker import Protection
    from kvobs.catalog import Row

_log = logging.getLogger("kvobs")
TICK_S = 0.25
STOP_S = 5.0
UNOBSERVED = "Nothing in this process observes an allocator, so that there is nothing to judge."
FLUSH_STORE_S = 2.0  # other processes of the directory may be at it


class Runtime:
    """One observed process. ``start`` and ``stop`` are idempotent; ``tick`` is the drain thread's body."""

    def __init__(self, config: Config, sources: Sequence[Source] | None = None,
                 clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.config = config
        self.bus = Bus(config.queue_events)
        self._clock = clock
        self._given_sources = sources
        self.sources: list[Source] = []
        self._lifecycle = threading.RLock()
        self._running = False
        self._failed: set[str] = set()  # parts whose failure was said
        self._open()

    def _open(self) -> None:
        """Everything that belongs to this very process (made again in a forked child)."""
        self.process_id = uuid.uuid4().hex
        self.metrics = Metrics(window_ms=self.config.window_ms, max_series=self.config.max_series)
        self.metrics.begin("kvobs.self.events.dropped", ("queue",), ("store",), ("otlp",))
        self.metrics.begin("kvobs.self.paused", ())
        self.metrics.begin("kvobs.self.turns.cut", ())
        self.slo = Objectives(self.config.objectives, self.metrics, self._clock())
        self.guard = Guard(self.config.overhead_percent / 100, deep=self.config.deep)
        self.flight = FlightRecorder()
        self.otel = OtelExporter(self.config, self.metrics, self.process_id)
        self.prometheus: PrometheusExporter | None = None
        self.store: StoreWriter | None = None
        self.endpoint: str | None = None
        self.targets: Targets | None = None
        self._role: ProcessRole | None = None
        self._facts: list[Availability] = list(self.slo.facts)
        self.protection = self._protection()
        self._wake = threading.Event()
        self._tick_lock = threading.Lock()
        self._pace = Pace(decides=self.protection is not None)
        self._guarded_ns: int | None = None
        self._thread: threading.Thread | None = None

    def _protection(self) -> Protection | None:
        if self.config.breaker == "off":
            return None
        from kvobs.breaker import Protection  # for few processes

        made = Protection(self.config, self.process_id, self.metrics, lambda: self.sources, self._clock,
                          self.otel_tracer)
        self._facts += made.facts
        return made

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Install the sources and start the drain thread and the exporters that the configuration names."""
        with self._lifecycle:
            if self._running or not self.config.enabled:
                return
            self._running = True
            self.bus.active, self.bus.deep = True, self.config.deep
            wiring = Wiring(self.config, self.bus, self.otel_tracer)
            self.sources = list(self._given_sources) if self._given_sources is not None else [
                factory(wiring) for factory in factories()]
            for source in self.sources:
                foresee = getattr(source, "foresee", None)
                if foresee is not None:
                    foresee(self._forecast)
                ending = getattr(source, "ending", None)
                if ending is not None:
                    ending(self.flush)
                maps = getattr(source, "maps", None)
                if maps is not None:
                    maps.watch(lambda: watched(self.config.store), self._held, self.config.overhead_percent / 100)
            for source in self.sources:
                self._guarded(f"install {source.name}", source.install, self.bus.publish)
            self._open_outputs()
            try:
                self._start_thread(self._drain_forever)
            except BaseException:
                self.stop()  # nobody would drain: nothing may stay hooked
                raise

    def _open_outputs(self) -> None:
        self._guarded("otlp", self.otel.prepare)
        if self.config.prometheus is not None:
            self._guarded("prometheus", self._start_prometheus)
        if self.config.store is not None:
            self._guarded("store", self._start_store)
            if self.endpoint is not None:
                self.targets = Targets(self.config.store, self.process_id, self.endpoint)
                # At once: Prometheus watches only directories that are there when it starts.
                self._guarded("targets", self.targets.keep, self._clock(), None)

    def _start_thread(self, body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body, name="kvobs-drain", daemon=True)
        thread.start()
        self._thread = thread

    def _start_prometheus(self) -> None:
        assert self.config.prometheus is not None
        control = self.protection.operator() if self.protection is not None else None
        exporter, fact = PrometheusExporter.start(self.metrics, *self.config.prometheus, self.process_id, control)
        self.prometheus, self.endpoint = exporter, exporter.url if exporter else None
        if fact is not None:
            self._facts.append(fact)

    def _start_store(self) -> None:
        assert self.config.store is not None
        self.store = StoreWriter(self.config.store, self.config.store_max_bytes, self.process_id, self.endpoint,
                                 retention_s=self.config.retention)

    def stop(self) -> None:
        """Uninstall the sources, drain what is queued, flush and close the exporters and the store."""
        with self._lifecycle:
            if not self._running:
                return
            if self.protection is not None:
                self._guarded("breaker", self.protection.stop, self._clock())
            ready = self.tick(sample=True)  # the last look: what is uninstalled has nothing to say any more
            self._running = False
            self.bus.wake = None
            for source in self.sources:
                self._guarded(f"uninstall {source.name}", source.uninstall)
            self.bus.active = False
            self._wake.set()
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join(timeout=STOP_S if ready else 0)
            drained = ready and self.tick(sample=True)
            self.bus.active = False  # the guard may just have resumed
            self._guarded("otlp", self.otel.stop)
            if self.targets is not None:
                self._guarded("targets", self.targets.close)
            if self.prometheus is not None:
                self._guarded("prometheus", self.prometheus.stop)
            if self.store is not None and drained:
                self._guarded("store", self.store.close)

    def flush(self) -> None:
        """Bring everything that happened so far to the exporters and the store; waits seconds at most."""
        if self.tick(sample=True) and self.store is not None and self._tick_lock.acquire(timeout=STOP_S):
            try:
                self._guarded("store", self.store.commit, FLUSH_STORE_S)
            finally:
                self._tick_lock.release()
        self._guarded("otlp", self.otel.flush)

    def verdict(self, device: str | None = None) -> list[NextStep]:
        """What would become of the next step of the live caches; see ``kvobs.autostart.Handle.verdict``."""
        for source in self.sources if self._running else ():
            judge: Callable[[str | None], list[NextStep]] | None = getattr(source, "verdict", None)
            if judge is not None:
                return judge(device)
        return [absent(UNOBSERVED, device or "")]

    def _forecast(self) -> Forecast:
        """What the sources say that the engine's next steps will ask for."""
        told = [source.demands() for source in self.sources if hasattr(source, "demands")]
        return Forecast(tuple(growth for one in told for growth in one.growths),
                        tuple(sentence for one in told for sentence in one.unknown))

    def _held(self) -> list[Held]:
        """The memory of which the sources know who holds it."""
        return [one for source in self.sources if hasattr(source, "held") for one in source.held()]

    def otel_tracer(self) -> Tracer:
        """The tracer of the process: the global provider's if there is one, else kvobs's own."""
        return self.otel.tracer()

    # -- the drain thread ------------------------------------------------------------------------------

    def _drain_forever(self) -> None:
        wake = self._wake
        while not wake.wait(TICK_S):
            self.tick()

    def tick(self, *, sample: bool = False) -> bool:
        """Interpret what is queued; now and then (``Pace``, or when told) also poll the sources and keep points.

        Returns False after 5 s in which another thread's tick did not end (a disk that does not answer, say): what it
        holds is not waited for.
        """
        if not self._tick_lock.acquire(timeout=STOP_S):
            _log.warning("kvobs: the drain thread is stuck, so what it holds is lost; the process is not affected.")
            return False
        try:
            began = time.thread_time()
            self._guarded("tick", self._tick, sample)
            self.metrics.count("kvobs.self.drain.duration", (), time.thread_time() - began)
        finally:
            self._tick_lock.release()
        return True

    def _tick(self, sample: bool) -> None:
        events: list[Event] = list(self.bus.drain())
        now = self._clock()
        due = self._pace.due(now, bool(events)) or sample
        if due:
            self._pace.looked(now)
            events += self._facts
            for source in self.sources if self._running else ():
                self._guarded(f"sample {source.name}", lambda s=source: events.extend(s.sample(now)))
                self._guarded(f"availability {source.name}", lambda s=source: events.extend(s.availability()))
        events = self.flight.complete(events)
        if self.protection is not None:
            self._guarded("breaker", self.protection.follow, now, events, self.slo.standings, due)
        self._guarded("metrics", self.metrics.fold, events)
        self._guarded("slo", self.slo.fold, events)
        self.metrics.count("kvobs.self.events.dropped", ("queue",), self.bus.take_dropped())
        if due:
            if self._running:
                self._keep_budget(now, events)
            self._guarded("metrics", self.metrics.refresh, now)
            self._guarded("slo", self.slo.refresh, now)
            self._keep_target(now, events)
        observations = self.metrics.take_observations()
        if due or observations:
            self._guarded("otlp", self.otel.tick, observations)
        points = self._points(now) if due else []
        if self.store is not None:
            self._guarded("store", self._keep, events, points, due)

    def _points(self, now: int) -> list[tuple[Row, dict[Attributes, Value]]]:
        """All points as of now, once a second: for the flight recorder and the store."""
        if self.store is not None:
            self.metrics.set("kvobs.self.store.size", (), self.store.size_bytes())
        points = self.metrics.collect()
        self.flight.note(now, points)
        return points

    def _keep_budget(self, now: int, events: list[Event]) -> None:
        """Ask the guard how much may be observed from now on, and say so."""
        before, level = self.guard.level, self.guard.observe(now, *self.metrics.engine_time())
        if before == PASSING and self._guarded_ns is not None:
            self.metrics.count("kvobs.self.paused", (), (now - self._guarded_ns) / SECOND_NS)
        self._guarded_ns = now
        self.bus.deep = self.config.deep and level == OBSERVING
        if level != before and PASSING in (level, before):
            (self.bus.pause if level == PASSING else self.bus.resume)()
        if level != before:
            self.metrics.pause(caches=level == PASSING, attention=level != OBSERVING)
            _log.warning("kvobs: %s", self.guard.reason or "Everything that is configured is observed again.")
        self.metrics.set("kvobs.self.overhead", (), self.guard.overhead)
        self.metrics.set("kvobs.self.throttle", (), level)
        fact = Availability("overhead", level == OBSERVING, self.guard.reason)
        self.metrics.fold([fact])
        events.append(fact)

    def _keep_target(self, now: int, events: list[Event]) -> None:
        """Let Prometheus find this process's endpoint, by what the process is."""
        self._role = next((event for event in reversed(events) if isinstance(event, ProcessRole)), self._role)
        self._pace.role = self._role.role if self._role is not None else ""
        if self.targets is not None and self._running:
            self._guarded("targets", self.targets.keep, now, self._role)

    def _keep(self, events: list[Event], points: list[tuple[Row, dict[Attributes, Value]]], due: bool) -> None:
        assert self.store is not None
        self.store.write(events)
        self.store.write_points(points)
        if due:  # a commit costs some milliseconds of CPU, however little is in it
            self.store.commit()
        self.metrics.count("kvobs.self.events.dropped", ("store",), self.store.take_dropped())
        for what, number in self.store.take_pruned():
            self.metrics.count("kvobs.self.store.pruned", (what,), number)

    def _guarded(self, what: str, call: Callable[..., object], *arguments: object) -> None:
        """Run a part of kvobs; its failure is logged once by name and never reaches the host."""
        try:
            call(*arguments)
        except Exception:
            say = _log.debug if what in self._failed else _log.warning
            self._failed.add(what)
            say("kvobs: %s failed; telemetry may be incomplete, the process is not affected.", what,
                exc_info=_log.isEnabledFor(logging.DEBUG))

    # -- fork ------------------------------------------------------------------------------------------

    def after_fork_in_child(self) -> None:
        """Begin anew: the parent's queue, thread, sockets, files and spans stay the parent's."""
        if not self._running:
            return
        self._lifecycle = threading.RLock()
        self.bus.clear()
        for part in (self.otel, self.prometheus, self.store, self.targets, self.protection):
            if part is not None:
                self._guarded("fork", part.abandon)
        for source in self.sources:
            renew = getattr(source, "after_fork_in_child", None)
            if renew is not None:
                self._guarded(f"fork {source.name}", renew)
        self._open()
        self.bus.resume()  # what the parent's guard had decided is the parent's
        self.bus.deep = self.config.deep
        self.bus.wake = self._first_event_in_child

    def _first_event_in_child(self, event: Event) -> None:
        # A data loader's worker never gets here: it opens no endpoint and no store. Nor does one that only frees
        # what it inherited.
        if isinstance(event, CacheGone):
            return
        with self._lifecycle:
            if self._running and self.bus.wake is not None:
                self.bus.wake = None
                self._guarded("start in a forked child", self._start_thread, self._open_and_drain)

    def _open_and_drain(self) -> None:
        self._open_outputs()
        self._drain_forever()


_current: Runtime | None = None
_guard = threading.RLock()


def start(config: Config | None = None) -> Runtime:
    """Start observing this process (once); later calls return the running runtime.

    Raises:
        kvobs.config.ConfigError: a setting was refused (nothing was started).
    """
    global _current
    with _guard:
        if _current is None:
            runtime = Runtime(config if config is not None else configuration.load())
            runtime.start()
            _current = runtime
            atexit.register(stop)
        return _current


def stop() -> None:
    """Stop observing: everything patched is restored, what was seen is flushed."""
    global _current
    with _guard:
        runtime, _current = _current, None
        atexit.unregister(stop)
        if runtime is not None:
            runtime.stop()


def current() -> Runtime | None:
    """The running runtime, if any."""
    return _current


def _after_fork() -> None:
    global _guard
    _guard = threading.RLock()
    if _current is not None:
        _current.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork)
