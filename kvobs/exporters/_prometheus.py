"""The Prometheus endpoint: kvobs's own registry behind its own small server, loopback unless told otherwise."""

from __future__ import annotations

import logging
import os

from kvobs.exporters._control import Control
from kvobs.exporters._environment import resource_attributes
from kvobs.exporters._http import ScrapeServer
from kvobs.metrics import Metrics
from kvobs.model import Availability

_log = logging.getLogger("kvobs")
SUBJECT = "prometheus endpoint"
MISSING = 'The Prometheus endpoint needs prometheus-client, which is not installed: pip install "kvobs[prometheus]".'
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class PrometheusExporter:
    """A running endpoint. ``url`` is where to scrape."""

    def __init__(self, server: ScrapeServer) -> None:
        self._server = server
        host, port = server.server_address[:2]
        shown = _ANYWHERE.get(str(host), str(host))
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/metrics"

    @classmethod
    def start(cls, metrics: Metrics, host: str, port: int, process_id: str = "",
              control: Control | None = None) -> tuple[PrometheusExporter | None, Availability]:
        """Serve ``metrics``, and what ``control`` lets an operator do. Never raises: the fact says where another port
        was taken, or why nothing is served.
        """
        try:
            from prometheus_client import CollectorRegistry

            from kvobs.exporters import _collector, _exposition
        except ImportError:
            return None, Availability(SUBJECT, False, MISSING)
        target = {"service.name": resource_attributes(os.environ).get("service.name", "unknown_service")}
        if process_id:
            target["service.instance.id"] = process_id
        registry = CollectorRegistry()
        registry.register(_collector.KvobsCollector(metrics, target))

        def render(accept: str, accept_encoding: str) -> tuple[str, bytes, bool]:
            openmetrics = _exposition.wants_openmetrics(accept)
            body = _exposition.encode(registry.collect(), openmetrics=openmetrics)
            return (_exposition.OPENMETRICS if openmetrics else _exposition.TEXT, body,
                    _exposition.accepts_gzip(accept_encoding))

        try:
            return cls(ScrapeServer(host, port, render, control)), Availability(SUBJECT, True, "")
        except OSError as error:
            refusal = error.strerror or str(error)
        try:
            exporter = cls(ScrapeServer(host, 0, render, control))
        except OSError as error:
            reason = f"No Prometheus endpoint can be bound on {host}: {error.strerror or error}."
            _log.warning("kvobs: %s", reason)
            return None, Availability(SUBJECT, False, reason)
        reason = f"Port {port} of {host} could not be bound ({refusal}), so {exporter.url} is served instead."
        _log.warning("kvobs: %s", reason)
        return exporter, Availability(SUBJECT, True, reason)

    def stop(self) -> None:
        """Stop serving."""
        self._server.stop()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's sockets without disturbing them."""
        self._server.abandon()
