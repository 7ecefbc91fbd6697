"""Served buckets against a naive count of the observations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client", reason="pip install 'kvobs[prometheus]' brings prometheus_client.")
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvobs.catalog import LATENCY_BUCKETS
from kvobs.exporters._collector import KvobsCollector
from kvobs.exporters._exposition import encode
from kvobs.metrics import Metrics
from kvobs.model import Allocation

_NS = st.one_of(st.integers(0, 5_000_000_000), st.sampled_from([round(bound * 1e9) for bound in LATENCY_BUCKETS]))


@given(st.lists(st.tuples(st.sampled_from(["cpu", 'cu"da\\0\n']), _NS), max_size=60))
def test_buckets_are_cumulative_counts(seen: list[tuple[str, int]]) -> None:
    """For any latencies each bucket counts those at most its bound, _count all of them, and _sum their sum."""
    metrics = Metrics()
    metrics.fold(Allocation(i, device, 1, ns) for i, (device, ns) in enumerate(seen))
    registry = CollectorRegistry()
    registry.register(KvobsCollector(metrics, {}))
    text = encode(registry.collect(), openmetrics=False).decode()
    served: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name == "kvobs_alloc_latency_seconds":
            for sample in family.samples:
                suffix = sample.labels.get("le", sample.name.rpartition("_")[2])
                served.setdefault(sample.labels["device"], {})[suffix] = sample.value
    assert set(served) == {device for device, _ in seen}
    for device, found in served.items():
        latencies = [ns for name, ns in seen if name == device]
        assert found.pop("count") == len(latencies)
        assert math.isclose(found.pop("sum"), sum(latencies) / 1e9, rel_tol=1e-12)
        assert {float(bound): count for bound, count in found.items()} == {
            bound: sum(latency <= bound * 1e9 for latency in latencies) for bound in (*LATENCY_BUCKETS, math.inf)}
