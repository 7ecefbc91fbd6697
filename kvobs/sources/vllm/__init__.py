"""vLLM (V1): its block pool and scheduler in the engine core, its requests in the API server."""

from __future__ import annotations

from kvobs.sources.vllm._frontend import FrontEndSource
from kvobs.sources.vllm._source import VllmSource

__all__ = ["FrontEndSource", "VllmSource"]
