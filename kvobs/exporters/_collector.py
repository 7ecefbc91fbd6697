"""The catalog as prometheus_client metric families, with exemplars. Imported only when the endpoint starts."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar, Sample

from kvobs.catalog import Row, prometheus_label, prometheus_name
from kvobs.exporters._exposition import Labels, number
from kvobs.exporters._instruments import description
from kvobs.metrics import Attributes, Histogram, Metrics

_UNITS = ("seconds", "bytes", "ratio")


def family_name(row: Row) -> str:
    """The name of the family: OpenMetrics says a counter's without the ``_total`` of its samples."""
    name = prometheus_name(row)
    return name.removesuffix("_total") if row.kind == "counter" else name


def _family(row: Row) -> Metric:
    name = family_name(row)
    unit = next((unit for unit in _UNITS if name.endswith(f"_{unit}")), "")
    return Metric(name, description(row), row.kind, unit)


@functools.lru_cache(maxsize=1024)
def _labels(names: tuple[str, ...], values: Attributes) -> Labels:
    return Labels(names, values)


@functools.lru_cache(maxsize=256)
def _buckets(names: tuple[str, ...], values: Attributes, bounds: tuple[float, ...]) -> tuple[Labels, ...]:
    return tuple(Labels(names, values, le=number(bound)) for bound in (*bounds, math.inf))


def _histogram(name: str, names: tuple[str, ...], values: Attributes, histogram: Histogram) -> Iterator[Sample]:
    cumulative, bucket, labels = 0, f"{name}_bucket", _labels(names, values)
    for le, count, latest in zip(_buckets(names, values, histogram.bounds), histogram.counts, histogram.exemplars,
                                 strict=True):
        cumulative += count
        exemplar = None if latest is None else Exemplar(
            {"trace_id": latest.trace_id, "span_id": latest.span_id}, latest.value, round(latest.wall_s, 3))
        yield Sample(bucket, le, cumulative, None, exemplar)
    yield Sample(f"{name}_count", labels, cumulative)
    yield Sample(f"{name}_sum", labels, histogram.total)


class KvobsCollector(Collector):
    """Reads the metric state at each scrape. ``target`` becomes ``target_info``: the process's resource."""

    def __init__(self, metrics: Metrics, target: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._target = {prometheus_label(key): value for key, value in target.items()}

    def collect(self) -> Iterator[Metric]:
        """Every family that has points now."""
        if self._target:
            info = Metric("target", "The process that these metrics are of.", "info")
            info.samples.append(Sample("target_info", self._target, 1))
            yield info
        for row, points in self._metrics.collect():
            family, sample = _family(row), prometheus_name(row)
            names = tuple(prometheus_label(key) for key in row.attributes)
            for attributes, value in points.items():
                if isinstance(value, Histogram):
                    family.samples.extend(_histogram(family.name, names, attributes, value))
                else:
                    family.samples.append(Sample(sample, _labels(names, attributes), value))
            yield family
