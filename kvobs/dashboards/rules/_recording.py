"""Recording rules: what alerts build on and what boards may draw cheaply. Ratios are of sums, never summed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvobs.config import Objective
from kvobs.dashboards.rules import _forecast
from kvobs.dashboards.rules._promql import by, increase, metric, total
from kvobs.slo import ALERTS, burn_expression, refusal, window_text

POOL = ("model", "device", "cache")
POOL_HEADROOM = "kvobs:kv_pool_headroom:ratio"
DEVICE_HEADROOM = "kvobs:device_headroom:ratio"
PREEMPTIONS = "kvobs:kv_preemptions:increase5m"
BURN = "kvobs:slo_burn:ratio"
DEVICE_TOTAL = total(metric("kvobs.device.memory"), "device")


def share(part: str, whole: str) -> str:
    """A ratio; no sample where there is nothing to divide by."""
    return f"{part}\n/ ({whole} > 0)"


def _pool_headroom() -> str:
    return share(total(metric("kvobs.kv.blocks", state="~cached|free"), *POOL), total(metric("kvobs.kv.blocks"), *POOL))


def _device_headroom() -> str:
    """Only where the parts add up to the device: what torch holds must be known."""
    free = total(metric("kvobs.device.memory", part="free"), "device")
    unused = total(metric("kvobs.allocator.usage", state="unused"), "device")
    return share(f"(\n  {free}\n  + {unused}\n)", _whole_device())


def _whole_device() -> str:
    return f"(\n  {DEVICE_TOTAL}\n  and {total(metric('kvobs.device.memory', part='torch'), 'device')}\n)"


def _p95() -> str:
    """``>= 0`` drops the NaN of a window without allocations."""
    buckets = metric("kvobs.alloc.latency", "_bucket")
    return f"histogram_quantile(0.95, sum by {by('device', 'le')} (rate({buckets}[5m]))) >= 0"


def _of_counters(part: str, whole: str, *labels: str) -> str:
    return share(total(increase(part, 300), *labels), total(increase(whole, 300), *labels))


def rules(objectives: Iterable[Objective]) -> list[dict[str, Any]]:
    """The recording rules of a rule group that is evaluated every 30 s, each after those that it needs."""
    plain = [
        (POOL_HEADROOM, _pool_headroom()), *_forecast.recorded(POOL_HEADROOM),
        (DEVICE_HEADROOM, _device_headroom()), *_forecast.recorded(DEVICE_HEADROOM),
        ("kvobs:device_used:ratio",
         share(total(metric("kvobs.device.memory", part="!free"), "device"), _whole_device())),
        (PREEMPTIONS, total(increase(metric("kvobs.kv.preemptions"), 300), "model")),
        ("kvobs:alloc_latency:p95_5m", _p95()),
        ("kvobs:alloc_slow:ratio5m",
         _of_counters(metric("kvobs.alloc.slow"), metric("kvobs.alloc.latency", "_count"), "device")),
        ("kvobs:kv_copied:per_written5m", _of_counters(metric("kvobs.kv.copied"), metric("kvobs.kv.written"), *POOL)),
        ("kvobs:prefix_hit:ratio5m", _of_counters(metric("kvobs.prefix.hit"), metric("kvobs.prefix.queried"), *POOL)),
    ]
    return [{"record": record, "expr": expression} for record, expression in plain] + [
        {"record": BURN, "expr": burn_expression(objective, seconds),
         "labels": {"objective": objective.name, "window": window_text(seconds)}}
        for objective in objectives for seconds in _windows(objective)]


def _windows(objective: Objective) -> list[int]:
    """The windows of the alerts that can fire for an objective, in seconds."""
    return sorted({seconds for alert in ALERTS if not refusal(objective, alert)
                   for seconds in (alert.short_s, alert.long_s)})
