"""Exporters: OpenTelemetry push and the Prometheus endpoint. Importing this loads no third-party back end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvobs.exporters._otel import OtelExporter
from kvobs.exporters._prometheus import PrometheusExporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor


def masking_processor(after: SpanProcessor, *, payloads: bool = True) -> SpanProcessor:
    """A span processor for an application's own provider: hands masked spans on to the processor ``after``.

    Args:
        payloads: also mask message contents, token ids, headers and parameters of queries.
    Raises:
        ImportError: the OpenTelemetry SDK is not installed.
    """
    from kvobs.exporters._masking import MaskingProcessor

    return MaskingProcessor(after, payloads=payloads)


__all__ = ["OtelExporter", "PrometheusExporter", "masking_processor"]
