"""What the standard ``OTEL_*`` variables ask for, as pure functions of an environment.

Source: the OpenTelemetry specification, "Environment variable specification" and "OTLP exporter".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal
from urllib.parse import unquote, urlsplit

Signal = Literal["traces", "metrics"]
Protocol = Literal["grpc", "http/protobuf"]

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def disabled(environ: Mapping[str, str]) -> bool:
    """Whether ``OTEL_SDK_DISABLED`` switches OpenTelemetry off."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def wanted(environ: Mapping[str, str], signal: Signal, otlp: str) -> bool:
    """Whether kvobs should push ``signal`` itself, given its own setting ``otlp`` (on, off or auto)."""
    if otlp == "off" or disabled(environ):
        return False
    if environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
        return False
    return otlp == "on" or bool(_endpoint(environ, signal))


def protocol(environ: Mapping[str, str], signal: Signal) -> Protocol:
    """The transport: as the variables say, else HTTP for the port that is registered for it, else gRPC."""
    named = (environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "").strip()
             or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "").strip()).lower()
    if named.startswith("http"):
        return "http/protobuf"
    if named == "grpc":
        return "grpc"
    try:
        port = urlsplit(_endpoint(environ, signal)).port
    except ValueError:
        port = None
    return "http/protobuf" if port == 4318 else "grpc"


def number(environ: Mapping[str, str], name: str, default: float) -> float:
    """A positive finite number from a variable, or the default where it is unset or makes no sense."""
    try:
        value = float(environ.get(name, ""))
    except ValueError:
        return default
    return value if 0 < value < math.inf else default


def resource_attributes(environ: Mapping[str, str]) -> dict[str, str]:
    """``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` (which wins) as attributes."""
    found = {}
    for item in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = item.partition("=")
        if equals and key.strip():
            found[key.strip()] = unquote(value.strip())
    if name := environ.get("OTEL_SERVICE_NAME", "").strip():
        found["service.name"] = name
    # The environment may hold bytes that are no text; an exporter must be able to encode them.
    return {key: value.encode("utf-8", "backslashreplace").decode() for key, value in found.items()}


def _endpoint(environ: Mapping[str, str], signal: Signal) -> str:
    return environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT", "").strip() or environ.get(
        ENDPOINT, "").strip()
