"""What an alert is, and how it becomes a rule."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Severity = Literal["page", "ticket", "info"]
Board = Literal["overview", "kv-cache", "allocator", "migration", "requests", "slo-breaker", "fleet", "telemetry"]


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert. ``wait`` is how long its expression must hold; ``board`` is where to look first.

    page: users are hurt, or are about to be, and somebody can do something now. ticket: somebody should look on a
    working day. info: nothing to do by itself; it explains others.
    """

    name: str
    expression: str
    wait: str = ""
    severity: Severity
    board: Board
    summary: str
    description: str

    def rule(self, runbooks: str, dashboards: str) -> dict[str, Any]:
        """The alerting rule, with links below the two bases."""
        held = {"for": self.wait} if self.wait else {}
        return {"alert": self.name, "expr": self.expression, **held, "labels": {"severity": self.severity},
                "annotations": {"summary": self.summary, "description": self.description,
                                **links(self.name, self.board, runbooks, dashboards)}}


def links(name: str, board: Board, runbooks: str, dashboards: str) -> dict[str, str]:
    """Where an alert's runbook and board are."""
    return {"runbook_url": f"{runbooks.rstrip('/')}/{name}.md",
            "dashboard_url": f"{dashboards.rstrip('/')}/d/kvobs-{board}"}
