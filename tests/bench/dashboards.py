"""How long a Prometheus with many processes takes to answer all queries of the board that is opened first."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench._rows import Plan, Progress, Row, repeated, skipped
from tests.dashboards.boards import Target, replaced, step, targets
from tests.dashboards.harness import Server, prometheus
from tests.dashboards.synthetic import BLOCK_S, chosen, make, page

GROUP = "Overview on Prometheus"
BOARD = "kvobs-overview"
INSTANCES, SERIES, HOURS, EVERY_S = 200, 300, 6, 30
BUDGET_MS = 1000.0
BROWSER = 6  # connections to one host


def ask(server: Server, target: Target, begin: int, end: int) -> float:
    """Milliseconds that a query of the board takes."""
    step_s = step(end - begin, target.points, EVERY_S)
    expr = replaced(target.expr, step_s=step_s, range_s=end - begin, scrape_s=EVERY_S)
    began = time.perf_counter()
    if target.instant:
        server.instant(expr, end)
    else:
        server.range(expr, begin, end, step_s)
    return (time.perf_counter() - began) * 1e3


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    """Once each query alone, then the board as a browser asks for it."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        yield skipped(GROUP, "the whole board", "Prometheus is not installed.", unit="ms", budget=BUDGET_MS)
        return
    instances = plan.rounds(INSTANCES, INSTANCES // 10)
    rounds = plan.rounds(5, 3)
    board = [target for target in targets() if target.board == BOARD]
    begin = int(time.time()) // BLOCK_S * BLOCK_S - HOURS * 3600
    end = begin + HOURS * 3600 - EVERY_S
    done = progress(rounds + 1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        kinds, series = page()
        samples = make(directory / "tsdb", chosen(series, board, SERIES), kinds, instances=instances, begin=begin,
                       hours=HOURS, every_s=EVERY_S)
        done()
        alone: dict[Target, list[float]] = {target: [] for target in board}
        together: list[float] = []
        cpu: list[float] = []
        with prometheus(directory) as server, ThreadPoolExecutor(BROWSER) as browser:
            for _ in range(rounds):
                for target in board:
                    alone[target].append(ask(server, target, begin, end))
                spent, began = server.cpu_s(), time.perf_counter()
                list(browser.map(lambda target: ask(server, target, begin, end), board))
                together.append((time.perf_counter() - began) * 1e3)
                cpu.append((server.cpu_s() - spent) * 1e3)
                done()
    steps = ", ".join(sorted({f"{step(end - begin, one.points, EVERY_S):g}" for one in board if not one.instant}))
    facts = (f"{instances} instances x {SERIES} series, {HOURS} h every {EVERY_S} s ({samples / 1e6:.1f} million "
             f"samples, all in blocks), {len(board)} queries, steps of {steps} s")
    yield repeated(GROUP, f"the whole board, {BROWSER} queries at a time", together, "ms", budget=BUDGET_MS, note=facts)
    yield repeated(GROUP, "the whole board, CPU of Prometheus", cpu, "ms")
    yield repeated(GROUP, "the whole board, one query after the other",
                   [sum(values) for values in zip(*alone.values(), strict=True)], "ms")
    for target in sorted(board, key=lambda one: -min(alone[one]))[:5]:
        yield repeated(GROUP, f"dearest: {target.panel} / {target.ref}", alone[target], "ms")
