"""Write docs/demo.svg, the README's picture: the demo's tables as a real run printed them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from kvobs.lab.demo import _report

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"


def main() -> int:
    """Run the demo with a store of its own and draw what it told."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-m", "kvobs", "demo", "--json"], stdout=subprocess.PIPE, check=False,
                              text=True, env=os.environ | {"KVOBS_STORE": folder, "KVOBS_PROMETHEUS": "off"})
        if done.returncode:
            return done.returncode
    told = [json.loads(line) for line in done.stdout.splitlines()]
    console = Console(record=True, width=_report.WIDTH, file=io.StringIO())
    for table in _report.tables_of(told):
        console.print(table, "")
    console.print(_report.NOTE, highlight=False, markup=False)
    PICTURE.parent.mkdir(exist_ok=True)
    # No font from elsewhere: the reader's own monospace draws it.
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title="kvobs demo"), flags=re.DOTALL)
    PICTURE.write_text(drawing.replace("Fira Code", "DejaVu Sans Mono"), encoding="utf-8")
    print(f"Wrote {PICTURE}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
