"""Write docs/demo.svg, the README's picture: the demo's table as a real run printed it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from kvobs.lab.demo import _report
from kvobs.store import StoreReader

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"


def main() -> int:
    """Run the demo with a store of its own and draw what that store holds."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "kvobs", "demo", "--json"], stdout=subprocess.DEVNULL, check=False,
                              env=os.environ | {"KVOBS_STORE": folder, "KVOBS_PROMETHEUS": "off"})
        if done.returncode:
            return done.returncode
        turns = [stored.record for stored in StoreReader(folder).turns()]
    console = Console(record=True, width=_report.PLAIN_WIDTH, file=io.StringIO())
    console.print(_report.table_of(turns))
    console.print(_report.NOTE, highlight=False, markup=False)
    PICTURE.parent.mkdir(exist_ok=True)
    # No font from elsewhere: the reader's own monospace draws it.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="kvobs demo"), flags=re.DOTALL)
    PICTURE.write_text(drawing.replace("Fira Code", "DejaVu Sans Mono"), encoding="utf-8")
    print(f"Wrote {PICTURE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
