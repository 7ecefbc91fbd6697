"""OpenTelemetry: the process's own providers where it has any, else private ones that push over OTLP.

Global providers are used and never set. Every wait has a deadline, so that an endpoint which is down, slow, refusing
or silent costs the host nothing; what it does not take is counted.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import metrics as metrics_api
from opentelemetry import trace
from opentelemetry.trace import ProxyTracerProvider, Tracer

from kvobs.config import Config
from kvobs.exporters import _environment as env
from kvobs.exporters._bystander import Bystander
from kvobs.exporters._deny import Rules
from kvobs.exporters._instruments import SCOPE, Instruments, instruments_of
from kvobs.exporters._tracers import EdgeTracer, MaskedTracer
from kvobs.metrics import Metrics, Observation
from kvobs.model import Availability

if TYPE_CHECKING:
    from kvobs.exporters._pusher import Pusher
    from kvobs.exporters._sdk import Meters, Traces
    from kvobs.exporters._sender import Sender

_log = logging.getLogger("kvobs")
SUBJECT = "otlp"
FLUSH_S = 5.0
STOP_S = 3.5
STOP_FAILING_S = 1.0  # an endpoint that has just refused is not worth the wait
LAST_S = 0.5
MISSING = ('Pushing over OTLP needs the OpenTelemetry SDK and its OTLP exporters, which are not installed: '
           'pip install "kvobs[otel]".')
NOT_ASKED = (f"No OTLP endpoint is set ({env.ENDPOINT}) and the process has no global OpenTelemetry providers, so "
             "nothing is pushed.")
UNDELIVERED = "The OTLP endpoint did not take the last push; what is lost is counted."
OFF = "Pushing over OTLP is switched off by the setting otlp or by OTEL_SDK_DISABLED."
# Objects of a parent process: their destructors must not run in a forked child (gRPC may hang there).
_left_to_parent: list[object] = []


def global_tracer_provider() -> trace.TracerProvider | None:
    """The TracerProvider that the application set, if any."""
    try:
        provider = trace.get_tracer_provider()
    except Exception:  # OTEL_PYTHON_TRACER_PROVIDER names one that cannot be loaded
        return None
    return None if isinstance(provider, ProxyTracerProvider) else provider


def global_meter_provider() -> metrics_api.MeterProvider | None:
    """The MeterProvider that the application set, if any."""
    try:
        provider = metrics_api.get_meter_provider()
    except Exception:
        return None
    # The API's placeholder has no public name.
    return None if type(provider).__name__ == "_ProxyMeterProvider" else provider


def sdk_installed() -> bool:
    """Whether the SDK can be imported (nothing is)."""
    try:
        return importlib.util.find_spec("opentelemetry.sdk") is not None
    except (ImportError, ValueError):
        return False


class OtelExporter:
    """The OpenTelemetry side of one process. ``tracer`` may be called on any thread, the rest on the drain thread."""

    def __init__(self, config: Config, metrics: Metrics, process_id: str,
                 environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._metrics, self._process_id, self._otlp = metrics, process_id, config.otlp
        self._percent, self._edges = config.trace_sample, config.span_depth == "edges"
        self._rules = None if config.mask == "off" else Rules(payloads=config.mask == "payloads")
        self._lock = threading.Lock()
        self._stopped = False
        self._global: tuple[trace.TracerProvider, Tracer] | None = None
        self._private: Tracer | None = None
        self._traces: Traces | None = None
        self._meters: Meters | None = None
        self._instruments: Instruments | None = None
        self._no_meters = False
        self._failure = ""
        self._said: Availability | None = None

    # -- traces ----------------------------------------------------------------------------------------

    def tracer(self) -> Tracer:
        """The tracer to use now. Never raises."""
        if self._stopped or env.disabled(self._environ):
            return Bystander()
        provider = global_tracer_provider()
        if provider is not None:
            return self._global_tracer(provider)
        if self._private is None:
            with self._lock:
                if self._private is None:
                    self._private = self._make_private()
        return self._private

    def _global_tracer(self, provider: trace.TracerProvider) -> Tracer:
        if self._otlp == "off":
            return Bystander()
        known = self._global
        if known is None or known[0] is not provider:
            tracer = provider.get_tracer(SCOPE)
            known = self._global = (provider, self._shaped(
                tracer if self._rules is None else MaskedTracer(tracer, self._rules)))
        return known[1]

    def _shaped(self, tracer: Tracer) -> Tracer:
        return EdgeTracer(tracer) if self._edges else tracer

    def _make_private(self) -> Tracer:
        exporter = None
        try:
            from kvobs.exporters import _sdk

            if env.wanted(self._environ, "traces", self._otlp):
                exporter = self._exporter("spans", "traces")
            self._traces = _sdk.Traces(self._environ, self._process_id, exporter, self._lost, self._percent,
                                        self._rules)
            return self._shaped(self._traces.provider.get_tracer(SCOPE))
        except ImportError:
            return Bystander()
        except Exception as error:
            self._fail("spans", error)
            return Bystander()

    # -- metrics and loss ------------------------------------------------------------------------------

    def tick(self, observations: Sequence[Observation]) -> None:
        """Record what the drain thread saw; the providers are chosen once there is something to tell."""
        if self._traces is not None and self._traces.queue is not None:
            self._lost(self._traces.queue.take_dropped())
        if self._instruments is None:
            self._choose(bool(observations))
        if self._instruments is not None:
            self._lost(self._instruments.record(observations))
        self._publish_fact()

    def prepare(self) -> None:
        """Import and ask at the start what spans and pushing will need.

        Not on the engine's thread at its first span, not on the drain thread (a fork during an import leaves the
        child with a module that nobody ends importing), not at exit (where no thread can be started).
        """
        if global_tracer_provider() is not None or env.disabled(self._environ):
            return
        try:
            from kvobs.exporters import _sdk

            _sdk.resource(self._environ, self._process_id)
            signals: tuple[env.Signal, ...] = ("traces", "metrics")
            for signal in signals:
                if env.wanted(self._environ, signal, self._otlp):
                    _sdk.import_exporter(signal, env.protocol(self._environ, signal))
        except ImportError:
            return

    def _choose(self, observed: bool) -> None:
        if self._stopped or self._no_meters or self._otlp == "off" or env.disabled(self._environ):
            return
        provider = global_meter_provider()
        if provider is None and env.wanted(self._environ, "metrics", self._otlp) and (observed or self._has_data()):
            provider = self._make_meters()
        if provider is not None:
            self._instruments = instruments_of(provider)
            self._instruments.attach(self._metrics)

    def _has_data(self) -> bool:
        """Whether an engine was seen; kvobs's facts about itself alone do not decide the provider."""
        return any(not row.name.startswith(("kvobs.self.", "kvobs.availability"))
                   for row, _ in self._metrics.collect())

    def _make_meters(self) -> metrics_api.MeterProvider | None:
        exporter = self._exporter("metrics", "metrics")
        if exporter is None:
            self._no_meters = True
            return None
        from kvobs.exporters import _sdk

        self._meters = _sdk.Meters(self._environ, self._process_id, exporter, self._lost, self._rules)
        return self._meters.provider

    def _exporter(self, what: str, signal: env.Signal) -> Any | None:
        try:
            from kvobs.exporters import _sdk

            return _sdk.exporter_class(signal, env.protocol(self._environ, signal))()
        except ImportError:
            self._failure = MISSING
        except Exception as error:
            self._fail(what, error)
        return None

    def _fail(self, what: str, error: Exception) -> None:
        self._failure = f"The OTLP exporter of {what} cannot be made: {type(error).__name__}: {error}."

    def _lost(self, number: int) -> None:
        self._metrics.count("kvobs.self.events.dropped", ("otlp",), number)

    # -- the fact --------------------------------------------------------------------------------------

    def availability(self) -> Availability:
        """Whether anything leaves this process through OpenTelemetry, and why not."""
        if self._otlp == "off" or env.disabled(self._environ):
            return Availability(SUBJECT, False, OFF)
        if global_tracer_provider() is not None or global_meter_provider() is not None:
            return Availability(SUBJECT, True, "")
        if not self._wanted():
            return Availability(SUBJECT, False, NOT_ASKED)
        if not self._failure and not sdk_installed():
            self._failure = MISSING
        failing = UNDELIVERED if any(sender.failing for _, sender in self._ways()) else ""
        return Availability(SUBJECT, not (self._failure or failing), self._failure or failing)

    def _wanted(self) -> bool:
        return any(env.wanted(self._environ, signal, self._otlp) for signal in ("traces", "metrics"))

    def _publish_fact(self) -> None:
        if not self._wanted():
            return
        fact = self.availability()
        if fact == self._said:
            return
        if self._said is not None:
            self._metrics.set("kvobs.availability", (SUBJECT, self._said.reason), None)
        self._said = fact
        self._metrics.set("kvobs.availability", (SUBJECT, fact.reason), int(fact.available))
        if not fact.available:
            _log.warning("kvobs: %s", fact.reason)

    # -- life ------------------------------------------------------------------------------------------

    def _ways(self) -> list[tuple[Pusher, Sender]]:
        ways: list[tuple[Pusher, Sender]] = []
        if self._traces is not None and self._traces.queue is not None:
            ways.append((self._traces.queue.pusher, self._traces.queue.sender))
        if self._meters is not None:
            ways.append((self._meters.pusher, self._meters.sender))
        return ways

    def flush(self) -> None:
        """Push what is there and wait until it is delivered or lost, at most 5 s."""
        if self._instruments is None:
            self._choose(observed=True)
        tickets = [(pusher, pusher.ask()) for pusher, _ in self._ways()]
        deadline = time.monotonic() + FLUSH_S
        for pusher, ticket in tickets:
            pusher.wait(ticket, deadline - time.monotonic())

    def stop(self) -> None:
        """A last push, then the end of kvobs's own providers; at most about 4 s against a silent endpoint."""
        if self._stopped:
            return
        if self._instruments is None:
            self._choose(observed=False)
        self._stopped = True
        ways = self._ways()
        for pusher, _ in ways:
            pusher.finish()
        begun = time.monotonic()
        for pusher, sender in ways:
            if not pusher.join(begun + STOP_FAILING_S - time.monotonic()) and not sender.failing:
                pusher.join(begun + STOP_S - time.monotonic())
        if self._traces is not None and self._traces.queue is not None:
            self._lost(self._traces.queue.close() + self._traces.queue.take_dropped())
        for _, sender in ways:
            sender.close()
        begun = time.monotonic()
        for pusher, _ in ways:
            pusher.join(begun + LAST_S - time.monotonic())
        if self._instruments is not None:
            self._instruments.finish()
            self._instruments = None
        self._traces = self._meters = None

    def abandon(self) -> None:
        """In a forked child: leave threads, connections and queued spans to the parent, without touching them."""
        self._stopped = True
        if self._traces is not None and self._traces.queue is not None:
            self._traces.queue.abandon()
        if self._instruments is not None:
            self._instruments.reset()
        _left_to_parent.append((self._traces, self._meters, self._private, self._instruments))
        self._traces = self._meters = self._private = self._instruments = None
