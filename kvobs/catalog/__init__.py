"""The catalog: every metric once. Exporters, docs, dashboards and alerts derive from these rows.

Units are UCUM; a counter or gauge may sum over ranks only where ``across_ranks`` says ``sum``. ``nature``
labels every value that is not an exact count or a direct measurement.
"""

from __future__ import annotations

from kvobs.catalog import _cache, _engine, _host, _http, _memory, _protect, _self, _serving, _slo
from kvobs.catalog._row import (
    EVICTION_BOUNDS_NS,
    EVICTION_BUCKETS,
    LATENCY_BUCKETS,
    SLOW_ALLOCATION,
    SLOW_BUCKET,
    Row,
)
from kvobs.config import LATENCY_BOUNDS_NS

ROWS: tuple[Row, ...] = (
    *_cache.ROWS, *_serving.ROWS, *_engine.ROWS, *_memory.ROWS, *_host.ROWS, *_slo.ROWS,
    *_protect.ROWS, *_http.ROWS, *_self.ROWS)

BY_NAME: dict[str, Row] = {row.name: row for row in ROWS}
if len(BY_NAME) != len(ROWS):
    raise RuntimeError("The catalog says a name twice.")

_PROMETHEUS_UNITS = {"s": "seconds", "By": "bytes", "W": "watts", "J": "joules", "Cel": "celsius"}


def prometheus_name(row: Row) -> str:
    """The metric family's Prometheus name, as OpenTelemetry's translation rules give it.

    Source: the OpenTelemetry specification, "Prometheus and OpenMetrics compatibility": dots become
    underscores, units are spelled out, a unitless gauge ends ``_ratio``, a counter ``_total``.
    """
    name = row.name.replace(".", "_")
    unit = "" if row.unit.startswith("{") else _PROMETHEUS_UNITS.get(row.unit, row.unit)
    if unit == "1":
        unit = "ratio" if row.kind == "gauge" else ""
    if unit and not name.endswith("_" + unit):
        name += "_" + unit
    return name + "_total" if row.kind == "counter" and not name.endswith("_total") else name


def prometheus_label(attribute: str) -> str:
    """The Prometheus label of an attribute key."""
    return attribute.replace(".", "_")


def markdown() -> str:
    """The generated metric table of the README and METRICS pages."""
    lines = [
        "| OpenTelemetry name | Prometheus name | kind | unit | attributes | across ranks | nature | meaning "
        "| formula |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | `{prometheus_name(row)}` | {row.kind} | `{row.unit}` | "
        f"{', '.join(f'`{a}`' for a in row.attributes) or '-'} | {row.across_ranks} | {row.nature} | "
        f"{row.meaning} | {row.formula} |"
        for row in ROWS
    ]
    return "\n".join(lines) + "\n"


__all__ = [
    "BY_NAME",
    "EVICTION_BOUNDS_NS",
    "EVICTION_BUCKETS",
    "LATENCY_BOUNDS_NS",
    "LATENCY_BUCKETS",
    "ROWS",
    "SLOW_ALLOCATION",
    "SLOW_BUCKET",
    "Row",
    "markdown",
    "prometheus_label",
    "prometheus_name",
]
