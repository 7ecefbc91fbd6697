"""What a row of the catalog is, and how rows are written."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvobs.config import LATENCY_BOUNDS_NS

Kind = Literal["counter", "gauge", "histogram"]
Ranks = Literal["sum", "max", "min"]
# Scraped: what another program says of itself, as old and as exact as it is.
Nature = Literal["exact", "measured", "estimated", "modelled", "scraped"]

# Seconds. The article's allocation-latency objective (S9); every SLO threshold is a boundary.
SLOW_ALLOCATION = 0.012
LATENCY_BUCKETS = tuple(bound / 1e9 for bound in LATENCY_BOUNDS_NS)  # the bounds are those of native counters
SLOW_BUCKET = LATENCY_BUCKETS.index(SLOW_ALLOCATION) + 1  # the first of those that are slow
STEP_BUCKETS = (1e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# The boundaries that the OpenTelemetry GenAI conventions advise for these standard instruments.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
# Seconds that blocks live and requests wait: from a burst to a working day.
EVICTION_BUCKETS = (0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)
EVICTION_BOUNDS_NS = tuple(round(bound * 1e9) for bound in EVICTION_BUCKETS)
PHASE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric: its OpenTelemetry name, kind, unit, attributes, and what it means."""

    name: str
    kind: Kind
    unit: str
    attributes: tuple[str, ...]
    meaning: str
    formula: str
    across_ranks: Ranks = "sum"
    nature: Nature = "exact"
    buckets: tuple[float, ...] = ()


WINDOW = " (64 ms unless window_ms says otherwise)."
WHO = ("model", "device", "cache")
LAYERS = ("model", "device", "layers")
GPU = ("hw.id", "hw.name")
HARDWARE = ("hw.id", "hw.type", "hw.name")
GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")


def counter(name: str, unit: str, attributes: tuple[str, ...], meaning: str, formula: str,
            nature: Nature = "exact", across_ranks: Ranks = "sum") -> Row:
    """A row of a count that only grows."""
    return Row(name=name, kind="counter", unit=unit, attributes=attributes, meaning=meaning, formula=formula,
               across_ranks=across_ranks, nature=nature)


def gauge(name: str, unit: str, attributes: tuple[str, ...], meaning: str, formula: str,
          across_ranks: Ranks = "sum", nature: Nature = "exact") -> Row:
    """A row of a state."""
    return Row(name=name, kind="gauge", unit=unit, attributes=attributes, meaning=meaning, formula=formula,
               across_ranks=across_ranks, nature=nature)


def histogram(name: str, unit: str, attributes: tuple[str, ...], buckets: tuple[float, ...], meaning: str,
              formula: str) -> Row:
    """A row of measured values, by bucket."""
    return Row(name=name, kind="histogram", unit=unit, attributes=attributes, meaning=meaning, formula=formula,
               nature="measured", buckets=buckets)
