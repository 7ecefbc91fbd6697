"""What importing costs, beyond an interpreter that starts and ends, and what it must not load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from tests.bench._processes import run
from tests.bench._rows import Plan, Progress, Row, compared

GROUP = "import"
BUDGET_MS = 150.0
FORBIDDEN = ("torch", "transformers", "numpy", "opentelemetry.sdk", "prometheus_client")
# What happens on `import kvobs`, and what `kvobs.instrument()` needs on top of it.
STATEMENTS = {"import kvobs": "import kvobs", "all that instrument() imports": "import kvobs.runtime"}


def loaded(statement: str) -> list[str]:
    """The forbidden modules that a statement loads."""
    code = f"{statement}; import sys; print(*(name for name in {FORBIDDEN!r} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds = plan.rounds(40, 5)
    done = progress(rounds)
    same: dict[str, list[float]] = {"wall": [], "CPU": []}
    extra: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in STATEMENTS for kind in same}
    for statement in STATEMENTS.values():  # compiled once before it counts
        run([sys.executable, "-c", statement])
    for _ in range(rounds):
        bare, again = (run([sys.executable, "-c", "pass"]) for _ in range(2))
        for name, statement in STATEMENTS.items():
            took = run([sys.executable, "-c", statement])
            for kind, ms, less in zip(same, took, bare, strict=True):
                extra[name, kind].append(ms - less)
        for kind, ms, less in zip(same, again, bare, strict=True):
            same[kind].append(ms - less)
        done()
    for (name, kind), values in extra.items():
        yield compared(GROUP, f"{name}, {kind}", values, same[kind], "ms",
                       budget=BUDGET_MS if name == "import kvobs" else None)
    for name, statement in STATEMENTS.items():
        found = loaded(statement)
        yield Row(group=GROUP, what=f"{name}, modules that must not load", value=float(len(found)), unit="modules",
                  runs=1, budget=0.0, note=", ".join(found) or f"none of {', '.join(FORBIDDEN)}")
