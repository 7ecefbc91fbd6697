"""What the OTEL_* variables ask for."""

from __future__ import annotations

import pytest

from kvobs.exporters import _environment as env

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(("environ", "otlp", "traces", "metrics"), [
    ({}, "auto", False, False),
    ({}, "on", True, True),
    ({ENDPOINT: "http://h:4317"}, "auto", True, True),
    ({ENDPOINT: " "}, "auto", False, False),
    ({ENDPOINT: "http://h:4317"}, "off", False, False),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4317"}, "auto", True, False),
    ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://h:4317"}, "auto", False, True),
    ({ENDPOINT: "http://h:4317", "OTEL_METRICS_EXPORTER": "none"}, "auto", True, False),
    ({"OTEL_TRACES_EXPORTER": "none"}, "on", False, True),
    ({ENDPOINT: "http://h:4317", "OTEL_SDK_DISABLED": "true"}, "on", False, False),
])
def test_signals_are_pushed_where_they_are_wanted(environ: dict[str, str], otlp: str, traces: bool,
                                                  metrics: bool) -> None:
    """A signal is pushed with the setting on, or auto and an endpoint that covers it, unless a variable forbids it."""
    assert env.wanted(environ, "traces", otlp) is traces
    assert env.wanted(environ, "metrics", otlp) is metrics


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, "grpc"),
    ({ENDPOINT: "http://h:4317"}, "grpc"),
    ({ENDPOINT: "http://h:4318"}, "http/protobuf"),
    ({ENDPOINT: "http://h:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc"),
    ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
    ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "grpc"),
    ({ENDPOINT: "http://h:notaport"}, "grpc"),
])
def test_protocol_is_named_or_follows_from_the_port(environ: dict[str, str], expected: str) -> None:
    """The variables name the protocol, the signal's own first; without a name port 4318 means HTTP."""
    assert env.protocol(environ, "traces") == expected


@pytest.mark.parametrize(("raw", "expected"), [
    ("250", 250), ("0", 7), ("-1", 7), ("inf", 7), ("nan", 7), ("soon", 7), ("", 7)])
def test_numbers_that_make_no_sense_are_the_default(raw: str, expected: float) -> None:
    """A positive finite number is taken, everything else is the default."""
    assert env.number({"N": raw}, "N", 7) == expected
    assert env.number({}, "N", 7) == 7


def test_resource_attributes_are_decoded_and_the_service_name_wins() -> None:
    """Percent-encoded values are decoded, malformed items skipped, and OTEL_SERVICE_NAME beats service.name."""
    assert env.resource_attributes({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a, team=x%20y ,broken,=z",
                                    "OTEL_SERVICE_NAME": "b"}) == {"service.name": "b", "team": "x y"}
