"""The catalog as OpenTelemetry instruments of one MeterProvider. Needs the API only."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider
from opentelemetry.metrics import Observation as Point
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from kvobs import metrics as state
from kvobs.catalog import BY_NAME, ROWS, Row
from kvobs.metrics import Attributes, Metrics, Observation, Value

SCOPE = "kvobs"
_NO_SPAN = Context()
MOST_EQUAL = 2_000  # 14 ms of the drain thread
# A MeterProvider cannot forget an instrument: those of a provider are made once, and read whichever
# Metrics is attached now.
_made: weakref.WeakKeyDictionary[MeterProvider, Instruments] = weakref.WeakKeyDictionary()


def instruments_of(provider: MeterProvider) -> Instruments:
    """The instruments of this provider, made at the first call."""
    found = _made.get(provider)
    if found is None:
        found = _made[provider] = Instruments(provider.get_meter(SCOPE))
    return found


def span_context(trace_id: str, span_id: str, sampled: bool) -> Context:
    """A context whose current span is the one with these hex ids: what an exemplar is taken from."""
    if not trace_id:
        return _NO_SPAN
    span = NonRecordingSpan(SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False,
                                        trace_flags=TraceFlags(TraceFlags.SAMPLED if sampled else 0)))
    return trace.set_span_in_context(span, _NO_SPAN)


def _histogram(meter: Meter, row: Row) -> Histogram:
    try:
        return meter.create_histogram(row.name, row.unit, description(row),
                                      explicit_bucket_boundaries_advisory=row.buckets)
    except TypeError:  # a MeterProvider written against an older API
        return meter.create_histogram(row.name, row.unit, description(row))


def description(row: Row) -> str:
    """The meaning, with the nature of every value that is not exact."""
    return row.meaning if row.nature == "exact" else f"{row.meaning} ({row.nature})"


class Instruments:
    """Counters and gauges read the attached state when they are collected; histograms are recorded."""

    def __init__(self, meter: Meter) -> None:
        self.reset()
        self._histograms: dict[str, Histogram] = {}
        for row in ROWS:
            if row.kind == "histogram":
                self._histograms[row.name] = _histogram(meter, row)
            elif row.kind == "counter":
                meter.create_observable_counter(row.name, [self._reader(row)], row.unit, description(row))
            else:
                meter.create_observable_gauge(row.name, [self._reader(row)], row.unit, description(row))

    def reset(self) -> None:
        """Read nothing any more. Takes no lock: in a forked child it may be held by a thread that is gone."""
        self._lock = threading.Lock()
        self._metrics: Metrics | None = None
        self._snapshot: dict[str, dict[Attributes, Value]] = {}
        self._final: dict[str, dict[Attributes, Value]] = {}

    def finish(self) -> None:
        """Let go of the attached state: counters keep their final values, gauges are read once more, then absent.

        The application's provider usually outlives kvobs, and its last collection must not lack the end.
        """
        with self._lock:
            if self._metrics is not None:
                self._final = {row.name: points for row, points in self._metrics.collect()}
            self._metrics = None

    def attach(self, metrics: Metrics) -> None:
        """Read ``metrics`` from now on."""
        with self._lock:
            self._metrics, self._snapshot, self._final = metrics, {}, {}

    def record(self, observations: Iterable[Observation]) -> int:
        """Record histogram observations, each under its own span so that its exemplar carries the trace id.

        Returns how many were left out: of equal ones that were counted together, ``MOST_EQUAL`` are recorded, since
        an instrument takes 7 us for each and has no way to take a number of them.
        """
        lost, latest = 0, ("", "", False)
        context = _NO_SPAN
        for seen in observations:
            key = (seen.trace_id, seen.span_id, seen.sampled)
            if key != latest:
                latest, context = key, span_context(*key)
            attributes = dict(zip(seen.row.attributes, seen.attributes, strict=True))
            for _ in range(min(seen.times, MOST_EQUAL)):
                self._histograms[seen.row.name].record(seen.value, attributes, context=context)
            lost += max(0, seen.times - MOST_EQUAL)
        return lost

    def _reader(self, row: Row) -> Callable[[CallbackOptions], Iterable[Point]]:
        def read(_: CallbackOptions) -> list[Point]:
            return [Point(value, dict(zip(row.attributes, attributes, strict=True)))
                    for attributes, value in self._points(row.name).items() if not isinstance(value, state.Histogram)]

        return read

    def _points(self, name: str) -> dict[Attributes, Value]:
        """The points of a row, taken out of one common snapshot per collection: a row asked again begins a new one."""
        with self._lock:
            if self._metrics is None:
                return self._final.get(name, {}) if BY_NAME[name].kind == "counter" else self._final.pop(name, {})
            if name not in self._snapshot:
                self._snapshot = {row.name: {} for row in ROWS}
                self._snapshot.update((row.name, points) for row, points in self._metrics.collect())
            return self._snapshot.pop(name)
