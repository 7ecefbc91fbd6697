"""Write docs/view.png, the README's picture of the live view: over a real conversation, while it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import Window, browsing, viewing
from tests.support import wait_until

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "view.png"


def main() -> int:
    """Run the demo with a store of its own, and take the picture in a turn of its long conversation."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        demo = subprocess.Popen([sys.executable, "-m", "kvobs", "demo", "--json", "--deep", "--turns", "6"],
                                stdout=subprocess.PIPE, text=True,
                                env=os.environ | {"KVOBS_STORE": str(store), "KVOBS_PROMETHEUS": "off"})
        try:
            assert demo.stdout is not None
            told = [demo.stdout.readline() for _ in range(4)]
            if not told[-1]:
                return demo.wait()
            with viewing(store) as address, browsing(width=1400, height=1080) as window:
                window.page.goto(address)
                wait_until(lambda: window.state().startswith("Live") and window.figure("tokens"), 60, "the page")
                wait_until(lambda: window.page.locator("canvas, svg.marks").count() >= 6, 60, "the charts")
                wait_until(lambda: drawn(window), 60, "a moment in the middle of a turn")
                PICTURE.parent.mkdir(exist_ok=True)
                window.page.screenshot(path=PICTURE)
        finally:
            demo.kill()
            demo.communicate()
    print(f"Wrote {PICTURE}.")
    return 0


def drawn(window: Window) -> bool:
    """Whether the model is at work, and nothing on the page is being drawn anew."""
    at_work = window.figure("tokens") not in ("", "0 /s") and window.figure("step") not in ("", "no value")
    return at_work and not window.page.locator("[data-stale=true], [data-testid=stSkeleton]").count()


if __name__ == "__main__":
    sys.exit(main())
