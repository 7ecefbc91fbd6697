"""SGLang: its KV pools, radix caches and retractions, in the scheduler's process."""

from __future__ import annotations

from kvobs.sources.sglang._hooking import through_registry
from kvobs.sources.sglang._source import SglangSource

__all__ = ["SglangSource", "through_registry"]
