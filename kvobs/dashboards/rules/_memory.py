"""Alerts about the memory of devices and of pools of KV blocks."""

from __future__ import annotations

from kvobs.dashboards.rules import _forecast
from kvobs.dashboards.rules._alert import Alert
from kvobs.dashboards.rules._promql import grown, increase, metric, total
from kvobs.dashboards.rules._recording import DEVICE_HEADROOM, DEVICE_TOTAL, POOL, POOL_HEADROOM, PREEMPTIONS

UNEXPLAINED = 0.05  # share of a device; contexts and races between readings stay below it
STORM = 10  # preemptions in 5 minutes
OF_ENDED = 0.25

_WHERE = "of {{ $labels.model }} on {{ $labels.device }} ({{ $labels.instance }})"
_DEVICE = "{{ $labels.device }} ({{ $labels.instance }})"


def _storm() -> str:
    """Where nothing ended there is nothing to compare with, and the storm is at its worst."""
    ended = total(increase(metric("kvobs.turns"), 300), "model")
    return f"({PREEMPTIONS} >= {STORM})\nunless {PREEMPTIONS} <= {OF_ENDED} * {ended}"


def _unexplained() -> str:
    """Only where kvobs knows what this process and the others hold: else their memory is within "unexplained"."""
    part = total(metric("kvobs.device.memory", part="unexplained"), "device")
    known = (total(metric("kvobs.device.memory", part=name), "device") for name in ("context", "others"))
    return "\nand ".join((f"{part}\n/ ({DEVICE_TOTAL} > 0) > {UNEXPLAINED}", *known))


ALERTS = (
    Alert(name="KvobsKvPoolExhaustionForecast", severity="ticket", board="kv-cache", wait=_forecast.WAIT,
          expression=_forecast.exhaustion(POOL_HEADROOM),
          summary=f"The KV pool {_WHERE} will be used up within 15 minutes.",
          description="{{ $value | humanizePercentage }} of the blocks are free or reusable. The line through the last "
                      "15 minutes reaches 0 within 15 minutes even at the upper edge of its band, and so does the "
                      "trend of the last 5 minutes."),
    Alert(name="KvobsDeviceMemoryExhaustionForecast", severity="page", board="allocator", wait=_forecast.WAIT,
          expression=_forecast.exhaustion(DEVICE_HEADROOM),
          summary=f"The memory of {_DEVICE} will be used up within 15 minutes.",
          description="{{ $value | humanizePercentage }} of the device is free or unused by its allocator. The line "
                      "through the last 15 minutes reaches 0 within 15 minutes even at the upper edge of its band, and "
                      "so does the trend of the last 5 minutes."),
    Alert(name="KvobsPreemptionStorm", severity="ticket", board="requests", wait="2m", expression=_storm(),
          summary="Requests of {{ $labels.model }} ({{ $labels.instance }}) preempt each other.",
          description="{{ $value | humanize }} requests lost their blocks within 5 minutes, more than one for every "
                      "four that ended."),
    Alert(name="KvobsBlockAllocationFailures", severity="ticket", board="kv-cache", wait="10m",
          expression=total(increase(metric("kvobs.kv.block.failures"), 180), *POOL) + " > 0",
          summary=f"The KV pool {_WHERE} has refused blocks for 10 minutes.",
          description="{{ $value | humanize }} refusals within the last 3 minutes; a request that waits is refused "
                      "anew at each step."),
    Alert(name="KvobsAllocatorRetries", severity="ticket", board="allocator", wait="10m",
          expression=grown(metric("kvobs.allocator.retries"), 300, "device") + " > 0",
          summary=f"The allocator of {_DEVICE} gives cached memory back and takes it again.",
          description="{{ $value | humanize }} allocations within 5 minutes failed at first, so that cached segments "
                      "were released; each of them waits for the device."),
    Alert(name="KvobsOutOfMemory", severity="page", board="allocator",
          expression=grown(metric("kvobs.out_of_memory"), 600, "model") + " > 0",
          summary="Calls of {{ $labels.model }} ({{ $labels.instance }}) ended in an out-of-memory error.",
          description="{{ $value | humanize }} within the last 10 minutes."),
    Alert(name="KvobsAllocatorOutOfMemory", severity="ticket", board="allocator",
          expression=grown(metric("kvobs.allocator.out_of_memory"), 600, "device") + " > 0",
          summary=f"Allocations on {_DEVICE} failed for good.",
          description="{{ $value | humanize }} within the last 10 minutes, whether or not a call ended because of it."),
    Alert(name="KvobsUnexplainedMemory", severity="ticket", board="allocator", wait="10m", expression=_unexplained(),
          summary=f"Memory of {_DEVICE} is held by nobody that kvobs knows.",
          description="{{ $value | humanizePercentage }} of the device is neither this process's, nor another's, nor "
                      "free."),
    Alert(name="KvobsUnexplainedBlocks", severity="ticket", board="kv-cache", wait="5m",
          expression=total(metric("kvobs.kv.unexplained"), *POOL) + " > 0",
          summary=f"Blocks of the KV pool {_WHERE} are in no state, or in two.",
          description="{{ $value | humanize }} blocks; in a sound pool there are none."),
)
