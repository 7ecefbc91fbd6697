"""Pull and push give one name: kvobs's own endpoint against an independent OTLP-to-Prometheus translation."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk", reason="The OpenTelemetry SDK is not installed (extra otel).")
pytest.importorskip("opentelemetry.exporter.prometheus",
                    reason="opentelemetry-exporter-prometheus is not installed (extra dev).")

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvobs.catalog import BY_NAME, ROWS
from kvobs.exporters._exposition import encode
from kvobs.exporters._instruments import instruments_of
from kvobs.metrics import Observation
from tests.unit.test_exporter_exposition import every_row, registry_of

# The specification ends a gauge of unit 1 in _ratio, as does the Collector; this translator leaves the unit out.
UNITLESS_GAUGES = {"kvobs_kv_fragmentation_article", "kvobs_window_fragmentation", "kvobs_self_overhead",
                   "hw_gpu_utilization", "hw_gpu_memory_utilization", "kvobs_engine_kv_utilization",
                   "kvobs_slo_target", "kvobs_slo_burn", "kvobs_slo_budget"}


def _series(text: str) -> set[tuple[str, frozenset[str]]]:
    """The (sample name, label names) of a scrape."""
    return {(sample.name, frozenset(sample.labels))
            for family in text_string_to_metric_families(text) for sample in family.samples
            if family.name != "target"}


def _translated(name: str) -> str:
    return f"{name}_ratio" if name in UNITLESS_GAUGES else name


def test_pull_and_push_give_the_same_names_and_labels() -> None:
    """For every row of the catalog the scraped samples have the names and labels that its OTLP points translate to."""
    state, own = every_row(), _series(generate_latest(REGISTRY).decode())  # prometheus_client's own, of Python
    reader = PrometheusMetricReader(disable_target_info=True)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    try:
        instruments = instruments_of(provider)
        instruments.attach(state)
        instruments.record(Observation(row, tuple(f"{key} 1" for key in row.attributes), row.buckets[1], "", "", False)
                           for row in ROWS if row.kind == "histogram")
        pushed = {(_translated(name), frozenset(label for label in labels if not label.startswith("otel_scope_")))
                  for name, labels in _series(generate_latest(REGISTRY).decode()) - own}
    finally:
        provider.shutdown()
    pulled = _series(encode(registry_of(state).collect(), openmetrics=False).decode())
    assert pulled == pushed
    assert len({name for name, _ in pulled}) == sum(3 if row.kind == "histogram" else 1 for row in ROWS)


def test_the_unitless_gauges_are_the_only_names_left_to_the_specification() -> None:
    """The list of names that the translator leaves without a unit is that of the catalog's gauges of unit 1."""
    assert {name.replace(".", "_") for name, row in BY_NAME.items()
            if row.kind == "gauge" and row.unit == "1"} == UNITLESS_GAUGES
