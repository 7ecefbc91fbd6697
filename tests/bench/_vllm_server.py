"""A real vLLM server on the CPU with and without kvobs: the same batches over HTTP, compared within each round.

Three servers stand side by side: without kvobs, the same once more, and with kvobs as ``pip install`` gives it. One at
a time answers, the others are held still. A throughput, or a time per output token, at least 0.99 of that without
kvobs is an overhead of at most 1.01 %; both forms are in the report.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvobs.lab.demo._cache import NAME, damage_of, models_directory
from tests.bench._engines import MISSING, SMOLLM2
from tests.bench._rows import Plan, Progress, Row, overhead, repeated, skipped
from tests.bench._statistics import bootstrap, median, ratios
from tests.bench._vllm_server_load import CONCURRENCY, batch
from tests.bench._vllm_server_process import AGAIN, OFF, ON, Arm, Costs, Scene, arms, other_plugins
from tests.vllm_engine import WHY_NOT, interpreters
from tests.vllm_server import make_model

GROUP = f"vLLM's server on the CPU, {CONCURRENCY} chats streamed at once, against no kvobs"
TINY = "tiny random Llama (2 layers)"
BUDGET = 1.01
WARM = 1  # rounds before those that count
KINDS = {"wall": "time per token (the inverse of throughput), wall clock",
         "tpot": "time per output token after a request's first, wall clock",
         "front": "time per token, CPU of the front end's process",
         "cpu": "time per token, CPU of all processes, of which two spin while they wait"}
TEXT = "Tell me a story about a fox, a hedge and a very slow train. "  # as many tokens, for the model of bytes
Taken = dict[str, list[float]]


class Seen(msgspec.Struct):
    """The rounds that count: times by arm and kind, what kvobs said of its own cost after each, and preemptions."""

    took: dict[str, Taken]
    costs: list[Costs]
    preemptions: float = 0.0


def prompts(scene: Scene, turn: int) -> list[str]:
    """The prompts of a round, no two with a common block: what an earlier round left is of no use."""
    return [f"{turn}.{number} {TEXT}" for number in range(scene.requests)]


def _asked(arm: Arm, scene: Scene, turn: int) -> dict[str, float]:
    batch(arm.port, ["Are you awake?"], 2)
    before = arm.cpu_ns()
    found = batch(arm.port, prompts(scene, turn), scene.tokens)
    spent = {pid: after - before.get(pid, 0) for pid, after in arm.cpu_ns().items()}
    made = scene.requests * scene.tokens
    return found | {"cpu": sum(spent.values()) / made, "front": spent[arm.server.child.pid] / made}


def _seen(scene: Scene, others: str, progress: Progress) -> Seen:
    done = progress((scene.rounds + WARM) * 3)
    seen = Seen({name: {kind: [] for kind in KINDS} for name in (OFF, AGAIN, ON)}, [])
    draw = random.Random(2)
    with (tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory,
          arms(scene, Path(directory), others) as found):
        for turn in range(-WARM, scene.rounds):
            for name in draw.sample(sorted(found), len(found)):
                arm = found[name]
                with arm.awake():
                    took = _asked(arm, scene, turn + WARM)
                    if name == ON and turn >= -1:
                        seen.costs.append(arm.costs())
                    if name == OFF and turn == scene.rounds - 1:
                        seen.preemptions = arm.preemptions() / (scene.rounds + WARM)
                if turn >= 0:
                    for kind, value in took.items():
                        seen.took[name][kind].append(value)
                done()
    return seen


def _ratio(tested: list[float], again: list[float], baseline: list[float]) -> str:
    """The acceptance's form: what is left of throughput, with the intervals."""
    with_kvobs, same = ratios(baseline, tested), ratios(baseline, again)
    inside, noise = bootstrap(with_kvobs), bootstrap(same)
    return (f"ratio {median(with_kvobs):.4f} ({inside.low:.4f} … {inside.high:.4f}), "
            f"A/A {median(same):.4f} ({noise.low:.4f} … {noise.high:.4f})")


def _rows(scene: Scene, version: str, others: str, progress: Progress) -> Iterator[Row]:
    seen = _seen(scene, others, progress)
    label = f"vLLM {version}, {scene.label}"
    for kind, what in KINDS.items():
        tested, baseline, again = (seen.took[name][kind] for name in (ON, OFF, AGAIN))
        yield overhead(GROUP, f"{label}: {what}", tested, baseline, again,
                       budget=None if kind == "front" else BUDGET,
                       note=f"{_ratio(tested, again, baseline)}; {median(baseline) / 1e6:.2f} ms per token without")
    parts = list(itertools.pairwise(seen.costs))
    hooks = [1e6 * (late.hook_s - early.hook_s) / (late.steps - early.steps) for early, late in parts]
    last, steps = seen.costs[-1], (seen.costs[-1].steps - seen.costs[0].steps) / len(parts)
    yield repeated(GROUP, f"{label}: the hooks' own time per step, all processes", hooks, "µs",
                   note=f"by their own clock; {steps:.0f} steps and {seen.preemptions:.1f} preemptions per batch; "
                        f"kvobs paused for {last.paused_s:g} s and lost {last.dropped:g} events")


def scenes(plan: Plan, tiny: Path) -> Iterator[Scene]:
    """What is measured: room for all, room for about a third, and in full mode a real model."""
    rounds = plan.rounds(40, 4)
    yield Scene(f"{TINY}, no pressure", tiny, "dummy", 128, 16, 64, rounds)
    yield Scene(f"{TINY}, pressure", tiny, "dummy", 24, 16, 64, rounds)
    model = models_directory() / NAME
    if not plan.quick and not damage_of(model):
        yield Scene(SMOLLM2, model, "auto", 128, 8, 12, 24)  # short: what drifts from round to round falls out


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    """With the servers of the first environment that is named."""
    if not interpreters():
        yield skipped(GROUP, "throughput and time per output token", WHY_NOT, unit="%", budget=BUDGET)
        return
    version, others = other_plugins()
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        for scene in scenes(plan, make_model(Path(directory))):
            yield from _rows(scene, version, others, progress)
    if not plan.quick and damage_of(models_directory() / NAME):
        yield skipped(GROUP, f"{SMOLLM2}: throughput and time per output token", MISSING, unit="%", budget=BUDGET)
