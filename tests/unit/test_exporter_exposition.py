"""The two formats of a scrape, against hand-written text and against prometheus_client's own encoders."""

# ruff: noqa: E501 (a scrape is quoted as it is)
from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'kvobs[prometheus]' brings prometheus_client.")
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest as reference_text
from prometheus_client.openmetrics.exposition import generate_latest as reference_openmetrics

from kvobs import model
from kvobs.catalog import ROWS
from kvobs.exporters._collector import KvobsCollector
from kvobs.exporters._exposition import accepts_gzip, encode, wants_openmetrics
from kvobs.metrics import Exemplar, Histogram, Metrics

# Made by hand from the formats' specifications.
TEXT = r"""# HELP target_info The process that these metrics are of.
# TYPE target_info gauge
target_info{service_instance_id="p1",service_name="chat"} 1.0
# HELP kvobs_migration_io_bytes_total KV bytes that changed device.
# TYPE kvobs_migration_io_bytes_total counter
kvobs_migration_io_bytes_total{dst="cpu",src="cuda:0"} 4096.0
# HELP kvobs_migration_operations_total KV buffers that changed device.
# TYPE kvobs_migration_operations_total counter
kvobs_migration_operations_total{dst="cpu",src="cuda:0"} 2.0
# HELP kvobs_migration_duration_seconds Host time of calls that move KV; absent for moves only seen afterwards. (measured)
# TYPE kvobs_migration_duration_seconds histogram
kvobs_migration_duration_seconds_bucket{dst="cpu",le="1e-06",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="1e-05",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.0001",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.00025",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.0005",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.001",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.0025",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.005",src="cuda:0"} 0.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.012",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.025",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.05",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.1",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.25",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="0.5",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="1.0",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="2.5",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_bucket{dst="cpu",le="+Inf",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_count{dst="cpu",src="cuda:0"} 1.0
kvobs_migration_duration_seconds_sum{dst="cpu",src="cuda:0"} 0.0078125
# HELP kvobs_self_events_total Events the drain thread interpreted.
# TYPE kvobs_self_events_total counter
kvobs_self_events_total 1.0
# HELP kvobs_self_fold_duration_seconds_total Time the drain thread spent interpreting events. (measured)
# TYPE kvobs_self_fold_duration_seconds_total counter
kvobs_self_fold_duration_seconds_total 0.0
# HELP kvobs_self_window_duration_seconds_total Time spent keeping and reading the sliding windows. (measured)
# TYPE kvobs_self_window_duration_seconds_total counter
kvobs_self_window_duration_seconds_total 0.0
# HELP kvobs_availability 1 for what can be observed here, 0 with a reason for what cannot.
# TYPE kvobs_availability gauge
kvobs_availability{reason="Needs \"x\\y\".",subject="gpu"} 0.0
"""
OPENMETRICS_HEAD = r"""# HELP target The process that these metrics are of.
# TYPE target info
target_info{service_instance_id="p1",service_name="chat"} 1.0
# HELP kvobs_migration_io_bytes KV bytes that changed device.
# TYPE kvobs_migration_io_bytes counter
# UNIT kvobs_migration_io_bytes bytes
kvobs_migration_io_bytes_total{dst="cpu",src="cuda:0"} 4096.0
"""
EXEMPLAR_LINE = ('kvobs_alloc_latency_seconds_bucket{device="cuda:0",le="0.012"} 1.0 '
                 '# {span_id="0123456789abcdef",trace_id="0123456789abcdef0123456789abcdef"} 0.0078125 1700000000.25')
TARGET = {"service.name": "chat", "service.instance.id": "p1"}


def registry_of(metrics: Metrics, target: dict[str, str] | None = None) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(KvobsCollector(metrics, target or {}))
    return registry


def _one_migration() -> Metrics:
    metrics = Metrics(clock=lambda: 0)
    origin = model.Origin("transformers", "m", "DynamicCache", "cuda:0", "float32")
    metrics.fold([model.Migration(1, origin, 7, "cuda:0", "cpu", 2, 4096, 7_812_500)])
    metrics.set("kvobs.availability", ("gpu", 'Needs "x\\y".'), 0)
    return metrics


def every_row(value: float = 1.5) -> Metrics:
    """A state in which every row of the catalog has one point."""
    metrics = Metrics()
    for row in ROWS:
        attributes = tuple(f"{key} 1" for key in row.attributes)
        if row.kind == "counter":
            metrics.count(row.name, attributes, value)
        elif row.kind == "gauge":
            metrics.set(row.name, attributes, value)
        else:
            histogram = Histogram(row.buckets)
            histogram.observe(row.buckets[1], Exemplar("ab" * 16, "cd" * 8, row.buckets[1], 1_700_000_000.25))
            metrics._table.points[row.name][attributes] = histogram
    return metrics


def test_text_of_a_known_state_is_the_hand_written_one() -> None:
    """A known state is served in the text format exactly as the format's specification has it."""
    assert encode(registry_of(_one_migration(), TARGET).collect(), openmetrics=False).decode() == TEXT


def test_openmetrics_of_a_known_state_is_the_hand_written_one() -> None:
    """OpenMetrics names counter families without _total, gives units, and ends with EOF."""
    text = encode(registry_of(_one_migration(), TARGET).collect(), openmetrics=True).decode()
    assert text.startswith(OPENMETRICS_HEAD)
    assert text.endswith("# EOF\n")


def test_exemplar_stands_at_its_bucket_in_openmetrics_only() -> None:
    """An exemplar's trace and span id, value and time stand at the bucket it fell into; the text format has none."""
    metrics = Metrics()
    histogram = Histogram((0.001, 0.012))
    histogram.observe(0.0078125, Exemplar("0123456789abcdef" * 2, "0123456789abcdef", 0.0078125, 1_700_000_000.25))
    metrics._table.points["kvobs.alloc.latency"][("cuda:0",)] = histogram
    assert EXEMPLAR_LINE in encode(registry_of(metrics).collect(), openmetrics=True).decode().splitlines()
    assert "trace_id" not in encode(registry_of(metrics).collect(), openmetrics=False).decode()


def test_encoder_equals_prometheus_clients_own() -> None:
    """For every row of the catalog both formats are byte for byte what prometheus_client's encoders make."""
    registry = registry_of(every_row(), TARGET)
    assert encode(registry.collect(), openmetrics=False) == reference_text(registry)
    assert encode(registry.collect(), openmetrics=True) == reference_openmetrics(registry)


def test_absent_values_have_no_line() -> None:
    """A metric without points does not appear at all: absent is not zero."""
    assert encode(registry_of(Metrics()).collect(), openmetrics=False) == b""


def test_help_names_the_nature_of_inexact_values() -> None:
    """Every row that is not exact says what it is in its HELP, and exact ones say nothing."""
    lines = [line for line in encode(registry_of(every_row()).collect(), openmetrics=False).decode().splitlines()
             if line.startswith("# HELP")]
    assert len(lines) == len(ROWS)
    for row, line in zip(ROWS, lines, strict=True):
        assert line.endswith(f" ({row.nature})") == (row.nature != "exact")


@pytest.mark.parametrize(("accept", "expected"), [
    ("", False),
    ("*/*", False),
    ("text/plain;version=0.0.4", False),
    ("application/openmetrics-text; version=1.0.0", True),
    ("application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
     "text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
    ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;q=0.6", False),
    ("application/openmetrics-text;q=0", False),
    ("application/openmetrics-text;q=nonsense", False),
    ("APPLICATION/OPENMETRICS-TEXT", True),
])
def test_format_follows_the_accept_header(accept: str, expected: bool) -> None:
    """OpenMetrics is served to whoever names it and does not prefer text; everybody else gets text."""
    assert wants_openmetrics(accept) is expected


@pytest.mark.parametrize(("header", "expected"), [
    ("", False), ("gzip", True), ("br, gzip;q=0.5", True), ("gzip;q=0", False), ("identity", False)])
def test_gzip_only_for_those_who_accept_it(header: str, expected: bool) -> None:
    """A body is compressed exactly when the header admits gzip."""
    assert accepts_gzip(header) is expected
