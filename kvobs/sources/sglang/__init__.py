"""SGLang: its KV pools, radix caches and retractions, in the scheduler's process."""

from __future__ import annotations

from kvobs.sources.sglang._plugin import plugin
from kvobs.sources.sglang._source import SglangSource

__all__ = ["SglangSource", "plugin"]
