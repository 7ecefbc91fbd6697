"""What several boards say or compute."""

from __future__ import annotations

from kvobs.catalog import SLOW_ALLOCATION
from kvobs.dashboards._model import Query
from kvobs.dashboards._panels import query, share
from kvobs.dashboards._promql import Expr, line, observed, quantile, ratio, state, where

NO_NVML = "not told by NVML"
NO_POOL = "no paged pool"
NO_PROBE = "no allocation timed"
NO_TURNS = "no turns ended"
NO_BREAKER = "breaker is off"
NO_WINDOW = "nothing in the window"
NO_STEPS = "no steps"
NONE_COUNTED = "none was counted"
NO_BRIDGE = "no engine is read"
NO_CACHE = "no live cache"
UNJUDGED = "nothing judged yet"
NO_ALLOCATOR = "no caching allocator"
# The C heap is told as an allocator too; it is no device, and its numbers are not to be added to a device's.
ACCELERATORS = "!cpu"
FASTEST = "12 ms: the objective's line"


def allocation_quantiles(*quantiles: float) -> tuple[Query, ...]:
    """The allocation latency's quantiles, and the objective's limit as a named line while there are any."""
    return (*(query(quantile(q, "kvobs.alloc.latency"), f"p{q * 100:g}") for q in quantiles),
            query(line(SLOW_ALLOCATION, where(observed("kvobs.alloc.latency"), "> 0"), "s"), FASTEST))


def unused_share() -> Expr:
    """The share of reserved allocator memory that is unused, per process and accelerator."""
    return share(*(state("kvobs.allocator.usage", "instance", "device", state=part, device=ACCELERATORS)
                   for part in ("unused", "allocated")))


def pool_in_use() -> Expr:
    """The share of a pool's blocks that requests hold, per process and pool."""
    by = ("instance", "model", "device", "cache")
    return ratio(state("kvobs.kv.blocks", *by, state="used"), state("kvobs.kv.blocks", *by), "used / all states")
