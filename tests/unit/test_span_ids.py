"""Ids of spans in a host that seeds its random numbers."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("opentelemetry.sdk", reason="The OpenTelemetry SDK is not installed (extra otel).")

from kvobs.exporters._sdk import Traces


def test_a_seed_neither_repeats_ids_nor_is_disturbed_by_them() -> None:
    """Two processes with the same seed have different trace and span ids, and the host's numbers stay its own."""
    tracer = Traces({}, "process", None, lambda _: None).provider.get_tracer("test")
    found = []
    for _ in range(2):
        random.seed(0)
        context = tracer.start_span("one").get_span_context()
        found.append((context.trace_id, context.span_id))
        assert context.is_valid
        assert random.getrandbits(32) == random.Random(0).getrandbits(32)
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]
