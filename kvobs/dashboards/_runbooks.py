"""The runbooks that alerts link to: part of the wheel, and beside the generated files in a clone."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
PLACES = (_PACKAGE / "_app" / "runbooks", _PACKAGE.parent / "dashboards" / "runbooks")


def runbooks() -> dict[str, str]:
    """File name and text of each runbook; none where an installation has none."""
    folder = next((place for place in PLACES if place.is_dir()), None)
    return {} if folder is None else {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.md"))}
