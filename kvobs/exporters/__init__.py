"""Exporters: OpenTelemetry push and the Prometheus endpoint. Importing this loads no third-party back end."""

from __future__ import annotations

from kvobs.exporters._otel import OtelExporter
from kvobs.exporters._prometheus import PrometheusExporter

__all__ = ["OtelExporter", "PrometheusExporter"]
