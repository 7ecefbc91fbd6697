"""The experiment: pairs of runs of the same sessions, with the breaker and without, in turns; a table and a file."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvobs.breaker import load_policy
from kvobs.breaker.simulator._trace import read_trace
from kvobs.lab.breaker_vllm import _plan as plan
from kvobs.lab.breaker_vllm import _server as server
from kvobs.lab.breaker_vllm._client import talk
from kvobs.lab.breaker_vllm._figures import COLUMNS, FIRST_TOKEN_S, Run, compared, figures
from kvobs.lab.demo._progress import say

SESSIONS = 8
LOOK_AHEAD = Path(__file__).with_name("look_ahead.toml")
WARMING = 0  # its seed; the pairs have the seeds from 1 on
TRACED = 5_000  # requests of a trace that are drawn from


class Settings(msgspec.Struct, frozen=True):
    """What the servers and the load were, as they are written beside the results."""

    vllm: str
    model: str
    arms: tuple[str, ...]
    lengths: str
    policy: str = "default"
    sessions: int = SESSIONS
    turns: int = plan.TURNS
    pool_blocks: int = server.BLOCKS
    block_tokens: int = server.BLOCK
    at_once: int = server.AT_ONCE
    objective_s: float = FIRST_TOKEN_S
    processors: int = 0
    load_before: float = 0.0
    machine: str = ""


class Results(msgspec.Struct, frozen=True):
    """Everything that is written."""

    settings: Settings
    runs: list[Run]


def lengths_of(trace: Path | None) -> list[tuple[int, int]]:
    """(prompt, output) tokens of a trace's first requests; nothing without one. Raises TraceError."""
    if trace is None:
        return []
    return [(one.prompt, one.output) for one in read_trace(trace, limit=TRACED).requests]


def measure(python: Path, version: str, model: Path, *, arms: Sequence[str], runs: int, sessions: int,
            trace: Path | None, policy: str, keep: Callable[[Results], object], options: Sequence[str] = ()
            ) -> Results:
    """Start a server per arm, warm each up, and have ``runs`` rounds of the arms, every other one backwards.

    What there is so far is given to ``keep`` after each run; ``options`` are further ones of vLLM.

    Raises:
        DemoError: a server did not start, or its breaker did not come to rest.
        TraceError: the trace was refused; PolicyError: the policy was.
    """
    lengths = lengths_of(trace)
    settings = Settings(vllm=version, model=model.name, arms=tuple(arms), sessions=sessions,
                        lengths=trace.name if trace else "log-normal",
                        policy=load_policy(policy).name, processors=len(os.sched_getaffinity(0)),
                        load_before=os.getloadavg()[0], machine=platform.machine())
    found: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="kvobs-breaker-") as scratch:
        say(f"vLLM {version} starts once per arm ({', '.join(arms)}); that takes a minute or two.")
        with server.servers(python, model, arms, Path(scratch), policy, options) as started:
            for arm in arms:
                _one(started[arm], arm, WARMING, plan.sessions(2, WARMING, lengths))
            for number in range(1, runs + 1):
                for arm in arms if number % 2 else reversed(arms):
                    run = _one(started[arm], arm, number, plan.sessions(sessions, number, lengths))
                    found.append(run)
                    keep(Results(settings, found))
                    say(f"Run {number} of {runs}, breaker {arm}: " + ", ".join(
                        f"{name} {run.figures[name]:.4g}" for name, _, _ in COLUMNS))
    return Results(settings, found)


def _one(arm: server.Server, name: str, seed: int, users: list[plan.Session]) -> Run:
    with arm.awake():
        arm.settle()
        before = arm.counters()
        told, seconds = talk(arm.port, users)
        arm.settle()  # by then counters have been brought up to date
        return Run(name, seed, figures(told, seconds, before, arm.counters()))


def table(results: Results) -> str:
    """All figures as a table in Markdown; what was compared is below the mean of each arm."""
    without, *others = results.settings.arms
    lines = [f"| | breaker {without} | "
             + " | ".join(f"{arm} | {arm} against {without} (95 %)" for arm in others) + " |",
             "|---|---|" + "---|---|" * len(others)]
    for name, unit, ratio in COLUMNS:
        cells = []
        for arm in others:
            one = compared(results.runs, name, without, arm, ratio=ratio)
            sign = "" if ratio else "+"
            cells += [f"{one.with_:.3g}", f"{'x' if ratio else ''}{one.effect:{sign}.3g} "
                      f"({one.low:{sign}.3g} to {one.high:{sign}.3g}), n = {one.pairs}"]
        lines.append(f"| {name.replace('_', ' ')}{f' ({unit})' if unit else ''} | {one.without:.3g} | "
                     + " | ".join(cells) + " |")
    return "\n".join(lines)
