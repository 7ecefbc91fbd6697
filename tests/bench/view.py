"""How long the Live page's script takes over small and huge stores, by Streamlit's own runner."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.bench._rows import Plan, Progress, Row, repeated, skipped

GROUP = "kvobs view, Live page"
BUDGET_MS = 1_000.0
SIZES = (10_000, 1_000_000)


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    try:
        from tests.unit.test_view_pages import big, run
    except BaseException as error:  # pytest's skip is no Exception
        yield skipped(GROUP, "script run", str(error), unit="ms", budget=BUDGET_MS)
        return
    rounds = plan.rounds(9, 3)
    done = progress(rounds * len(SIZES))
    for size in SIZES:
        with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as folder:
            big(Path(folder), size)
            page = run("live", Path(folder))
            for reach in ("5 min", "all"):
                took = []
                for _ in range(rounds):
                    began = time.perf_counter()
                    page.sidebar.radio[0].set_value(reach).run()
                    took.append(1000 * (time.perf_counter() - began))
                    if reach == "all":
                        done()
                yield repeated(GROUP, f"{size:,} points, range {reach}", took, "ms", budget=BUDGET_MS)
