"""Write docs/explain.png, the README's picture of a report: the out-of-memory error that anyone can make."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvobs.allocator.explain import explain
from kvobs.allocator.readers import read
from kvobs.allocator.report import write_html
from kvobs.lab.out_of_memory import run
from tests.browser import browsing

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "explain.png"


def main() -> int:
    """Make the snapshot, explain it, and take the verdict, the timeline and the map."""
    with tempfile.TemporaryDirectory() as folder:
        snapshot, page = Path(folder) / "oom.pickle", Path(folder) / "report.html"
        run().dump(snapshot)
        recording = read(snapshot)
        found = explain(recording)
        write_html(recording, found.replays, found.document, page)
        with browsing(width=1280, height=2640) as window:
            window.page.goto(page.as_uri())
            window.page.locator("canvas").first.wait_for()
            top = window.page.get_by_text("Reserved, active, allocated").bounding_box()
            end = window.page.get_by_text("The largest blocks at this moment").bounding_box()
            assert top is not None
            assert end is not None
            PICTURE.parent.mkdir(exist_ok=True)
            window.page.screenshot(path=PICTURE, full_page=True, clip={
                "x": 0, "y": top["y"] - 10, "width": 1280, "height": end["y"] - top["y"]})
    print(f"Wrote {PICTURE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
