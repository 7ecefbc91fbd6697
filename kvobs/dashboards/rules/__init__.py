"""Recording rules, alerts and the Alertmanager's configuration."""

from __future__ import annotations

from collections.abc import Sequence

from kvobs.config import Objective

RUNBOOKS = "runbooks"
DASHBOARDS = ""


def files(objectives: Sequence[Objective], runbooks: str, dashboards: str) -> dict[str, str]:
    """Relative path and text of every file for Prometheus."""
    return {}
