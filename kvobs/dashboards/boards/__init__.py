"""The eight boards."""

from kvobs.dashboards.boards import (
    _allocator,
    _fleet,
    _kv_cache,
    _migration,
    _overview,
    _requests,
    _slo_breaker,
    _telemetry,
)
from kvobs.dashboards.boards._waterfall import parts as waterfall_parts

BOARDS = (_overview.BOARD, _kv_cache.BOARD, _allocator.BOARD, _migration.BOARD, _requests.BOARD, _slo_breaker.BOARD,
          _fleet.BOARD, _telemetry.BOARD)

__all__ = ["BOARDS", "waterfall_parts"]
