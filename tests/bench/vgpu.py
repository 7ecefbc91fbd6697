"""The virtual GPU: its allocator natively, and decoding on it beside plain CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from tests.bench._engines import MISSING, SMOLLM2, TINY
from tests.bench._rows import Plan, Progress, Row, compared, repeated, skipped
from tests.bench._statistics import ratios

GROUP = "virtual GPU"
PAIR_NS, TIMES = 600, 1.3  # 300 ns for an allocation, as many for its free


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    """In a process of its own: torch cannot take a device type back."""
    from kvobs.virtual import why_not

    done = progress(1)
    reason = why_not()
    if reason is not None:
        yield skipped(GROUP, "an allocation and its free, natively", reason, unit="ns", budget=PAIR_NS)
        return
    sizes = json.dumps([plan.rounds(12, 3), plan.rounds(48, 16)])
    ran = subprocess.run([sys.executable, "-m", "tests.bench._vgpu_child", sizes], check=True, capture_output=True,
                         text=True)
    told = json.loads(ran.stdout.splitlines()[-1])
    done()
    yield repeated(GROUP, "an allocation and its free, natively", told["pairs_ns"], "ns", budget=PAIR_NS,
                   note="10 sizes from 512 B to 12 MiB, one replaced at a time")
    for name, budget in ((TINY, None), (SMOLLM2, TIMES)):
        found = told[name]
        if found is None:
            yield skipped(GROUP, f"{name}: decoding, times plain CPU", MISSING, unit="x", budget=budget)
            continue
        yield compared(GROUP, f"{name}: decoding, times plain CPU", ratios(found["vgpu"], found["cpu"]),
                       [one - 1 for one in ratios(found["again"], found["cpu"])], "x", budget=budget)
