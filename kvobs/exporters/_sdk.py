"""kvobs's own OpenTelemetry providers, for a process that has none. Only this module and ``_masking`` import the SDK.

The SDK's own batch processor and periodic reader can block a shutdown for 30 s, restart their threads on the parent's
connections in a forked child, and do not tell what they dropped; both are replaced here by a :class:`Pusher`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from kvobs.exporters._deny import Rules
from kvobs.exporters._environment import Protocol, Signal, number, resource_attributes
from kvobs.exporters._masking import masked_resource, masked_span
from kvobs.exporters._pusher import Pusher
from kvobs.exporters._sender import Sender

Lost = Callable[[int], None]


def sampler(percent: float | None) -> Sampler | None:
    """Follows a parent's decision, local or remote; of new traces records this share. None, the SDK's own, for None."""
    return None if percent is None else ParentBased(TraceIdRatioBased(percent / 100))


def resource(environ: Mapping[str, str], process_id: str, rules: Rules | None = None) -> Resource:
    """The process as OTLP sees it: the SDK's defaults and detectors, the user's attributes on top, masked by rules."""
    found = _detected(environ.get("OTEL_RESOURCE_ATTRIBUTES"), environ.get("OTEL_SERVICE_NAME"))
    if "process.pid" in found.attributes:
        found = found.merge(Resource({"process.pid": os.getpid()}))  # this may be a fork of the one that was asked
    if "service.instance.id" not in resource_attributes(environ):
        found = found.merge(Resource({"service.instance.id": process_id}))
    return found if rules is None else masked_resource(found, rules)


@functools.lru_cache(maxsize=4)
def _detected(*_variables: str | None) -> Resource:
    """What the SDK's detectors say, asked once and early: they run on threads, which cannot start at exit."""
    return Resource.create()


def span_exporter_class(protocol: Protocol) -> Callable[[], Any]:
    """The OTLP span exporter, which reads the ``OTEL_EXPORTER_OTLP_*`` variables itself; ImportError if missing."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    return Http


def metric_exporter_class(protocol: Protocol) -> Callable[[], Any]:
    """The OTLP metric exporter, which reads the ``OTEL_EXPORTER_OTLP_*`` variables itself; ImportError if missing."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        return Grpc
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    return Http


def exporter_class(signal: Signal, protocol: Protocol) -> Callable[[], Any]:
    """The OTLP exporter of a signal; ImportError if missing."""
    return span_exporter_class(protocol) if signal == "traces" else metric_exporter_class(protocol)


def import_exporter(signal: Signal, protocol: Protocol) -> None:
    """Import all that making the exporter imports."""
    make = exporter_class(signal, protocol)
    if protocol != "grpc":  # over HTTP some is only imported when one is made; a gRPC channel is not made in vain
        with contextlib.suppress(Exception):  # a refused variable is reported when the exporter is needed
            make().shutdown()


def count_points(data: MetricsData) -> int:
    """Data points in a collection."""
    return sum(len(metric.data.data_points) for of_resource in data.resource_metrics
               for scope in of_resource.scope_metrics for metric in scope.metrics)


class SpanQueue(SpanProcessor):
    """Ended spans waiting for their push: bounded; a full queue drops the newest and counts it.

    They are masked by ``rules`` on the thread that pushes, not on the engine's; one that cannot be is lost and counted.
    """

    def __init__(self, exporter: Any, lost: Lost, environ: Mapping[str, str], rules: Rules | None = None) -> None:
        self._rules, self._lost = rules, lost
        self._queue: deque[ReadableSpan] = deque()
        self._limit = int(number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 2048))
        self._batch = min(self._limit, int(number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512)))
        self._drop_lock = threading.Lock()
        self._dropped = 0
        self._closed = False
        self.sender = Sender("spans", exporter, SpanExportResult.SUCCESS, lost)
        self.pusher = Pusher("kvobs-otlp-spans", self._push, number(environ, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1e3)

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a sampled span (on the engine's thread: no waiting, no formatting)."""
        if self._closed or span.context is None or not span.context.trace_flags.sampled:
            return
        if len(self._queue) >= self._limit:
            with self._drop_lock:
                self._dropped += 1
            return
        self._queue.append(span)
        if len(self._queue) >= self._batch:
            self.pusher.ask()

    def take_dropped(self) -> int:
        """How many spans found the queue full since the last call."""
        with self._drop_lock:
            dropped, self._dropped = self._dropped, 0
        return dropped

    def abandon(self) -> None:
        """In a forked child: ignore spans that the parent's provider still ends here."""
        self._closed = True

    def close(self) -> int:
        """Take no more spans; returns how many were still waiting and are lost."""
        self._closed = True
        waiting = len(self._queue)
        self._queue.clear()
        return waiting

    def _push(self) -> None:
        while batch := self._take():
            if self._rules is not None:
                batch = self._masked(batch, self._rules)
            if batch:
                self.sender.send(batch, len(batch))

    def _masked(self, batch: list[ReadableSpan], rules: Rules) -> list[ReadableSpan]:
        out = []
        for span in batch:
            try:
                out.append(masked_span(span, rules))
            except Exception:  # what cannot be searched may hold anything
                self._lost(1)
        return out

    def _take(self) -> list[ReadableSpan]:
        batch: list[ReadableSpan] = []
        # close() may empty the queue between a length test and a popleft.
        while len(batch) < self._batch:
            try:
                batch.append(self._queue.popleft())
            except IndexError:
                break
        return batch


class _Ids(IdGenerator):
    """Ids that no seed of the host repeats (vLLM seeds ``random`` with 0 everywhere) and that do not draw from it."""

    def __init__(self) -> None:
        self._source = random.SystemRandom()

    def _draw(self, bits: int) -> int:
        return self._source.randrange(1, 1 << bits)

    def generate_span_id(self) -> int:
        """64 bits, not all of them 0."""
        return self._draw(64)

    def generate_trace_id(self) -> int:
        """128 bits, not all of them 0."""
        return self._draw(128)


class Traces:
    """A private TracerProvider; without an exporter its spans have valid ids and go nowhere."""

    def __init__(self, environ: Mapping[str, str], process_id: str, exporter: Any | None, lost: Lost,
                 percent: float | None = None, rules: Rules | None = None) -> None:
        """``percent`` of new traces are recorded; None leaves it to the SDK and its variables."""
        self.provider = TracerProvider(sampler(percent), resource(environ, process_id, rules), shutdown_on_exit=False,
                                       id_generator=_Ids())
        self.queue: SpanQueue | None = None
        if exporter is not None:
            self.queue = SpanQueue(exporter, lost, environ, rules)
            self.provider.add_span_processor(self.queue)


class Meters:
    """A private MeterProvider whose points are pushed on kvobs's own thread."""

    def __init__(self, environ: Mapping[str, str], process_id: str, exporter: Any, lost: Lost,
                 rules: Rules | None = None) -> None:
        self._reader = InMemoryMetricReader(getattr(exporter, "_preferred_temporality", None),
                                            getattr(exporter, "_preferred_aggregation", None))
        self.provider = MeterProvider([self._reader], resource(environ, process_id, rules), shutdown_on_exit=False)
        self.sender = Sender("metrics", exporter, MetricExportResult.SUCCESS, lost)
        self.pusher = Pusher("kvobs-otlp-metrics", self._push,
                             number(environ, "OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1e3)

    def _push(self) -> None:
        data = self._reader.get_metrics_data()
        if data is not None and (size := count_points(data)):
            self.sender.send(data, size)
