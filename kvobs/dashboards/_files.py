"""Every generated file, by its path."""

from __future__ import annotations

from kvobs.config import ARTICLE
from kvobs.dashboards import rules
from kvobs.dashboards._coverage import WAIVED
from kvobs.dashboards._json import Form, text
from kvobs.dashboards._text import metrics_page, panels_page
from kvobs.dashboards.boards import BOARDS


def boards(form: Form = "provisioned") -> dict[str, str]:
    """File name and text of each board."""
    return {f"{board.uid}.json": text(board, form) for board in BOARDS}


def generated() -> dict[str, str]:
    """What is committed under ``dashboards/``: relative path and text, for the article's objective."""
    return {**{f"generated/{name}": content for name, content in boards().items()},
            **{f"grafana.com/{name}": content for name, content in boards("grafana.com").items()},
            "METRICS.md": metrics_page(BOARDS, WAIVED), "PANELS.md": panels_page(BOARDS),
            **rules.files((ARTICLE,), rules.RUNBOOKS, rules.DASHBOARDS)}
