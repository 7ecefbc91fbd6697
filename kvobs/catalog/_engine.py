"""What serving engines say of themselves: read from their own metrics, so as old, sampled and defined as those are."""

from __future__ import annotations

from kvobs.catalog._row import Row

ROWS: tuple[Row, ...] = ()
