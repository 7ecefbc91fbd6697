"""Runs compared: what users got, what it cost, and what the breaker did. Everything here is modelled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from kvobs.breaker._conditions import leaves
from kvobs.breaker._states import Policy, Transition
from kvobs.breaker.simulator._engine import OK, OUT_OF_MEMORY
from kvobs.breaker.simulator._run import CUT, REFUSED, Ended, Run
from kvobs.breaker.simulator._server import Server
from kvobs.breaker.simulator._signals import TOLD

SECOND = 10**9
NOTES = (
    "Everything here is modelled: a server of blocks, steps and a linear cost, not a measurement of one.",
    "A request meets its objectives if it finished, its user saw the first token in time (refusals included), and its "
    "mean time per output token was in time. Goodput counts the output tokens of those; met counts them among all "
    "requests, the refused ones too.",
    "Priorities are drawn, since traces have none.",
)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run in figures. Latencies in seconds, None where no request had one; ``level_s`` has the seconds at levels 0
    to 3, and is empty without a breaker. ``hit_share`` is of the tokens of prompts that were not refused for good; what
    a preempted request finds again of its own is no hit.
    """

    policy: str
    requests: int
    finished: int
    cut: int
    refused: int
    out_of_memory: int
    met: int
    met_share: float
    met_share_of_finished: float | None
    goodput_tokens: int
    goodput_per_s: float
    generated_tokens: int
    cut_tokens: int
    refusals: int
    preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    hit_share: float | None
    evicted_blocks: int
    dropped_blocks: int
    offloaded_blocks: int
    fetched_blocks: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    duration_s: float
    transitions: int
    level_s: tuple[float, ...]


def figures(run: Run, server: Server) -> Figures:
    """A run in figures."""
    count = {outcome: sum(one.outcome == outcome for one in run.ended)
             for outcome in (OK, CUT, REFUSED, OUT_OF_MEMORY)}
    prompts = sum(one.prompt for one in run.ended if one.outcome != REFUSED)
    met = [one for one in run.ended if meets(one, server)]
    finished, seconds = count[OK] + count[CUT], run.duration_ns / SECOND
    goodput = sum(one.generated for one in met)
    ttft = sorted(one.ttft_ns for one in run.ended if one.ttft_ns is not None)
    tpot = sorted(one.tpot_ns for one in run.ended if one.tpot_ns is not None)
    return Figures(
        policy=run.policy, requests=len(run.ended), finished=finished, cut=count[CUT], refused=count[REFUSED],
        out_of_memory=count[OUT_OF_MEMORY], met=len(met), met_share=len(met) / len(run.ended),
        met_share_of_finished=len(met) / finished if finished else None, goodput_tokens=goodput,
        goodput_per_s=goodput / seconds if seconds else 0.0,
        generated_tokens=sum(one.generated for one in run.ended),
        cut_tokens=sum(one.asked - one.generated for one in run.ended if one.outcome == CUT),
        refusals=sum(one.refusals for one in run.ended), preemptions=run.preemptions, computed_tokens=run.computed,
        recomputed_tokens=run.recomputed, hit_share=sum(one.hit for one in run.ended) / prompts if prompts else None,
        evicted_blocks=run.evictions, dropped_blocks=run.dropped, offloaded_blocks=run.offloaded,
        fetched_blocks=run.fetched, ttft_p50_s=_quantile(ttft, 0.5), ttft_p99_s=_quantile(ttft, 0.99),
        tpot_p50_s=_quantile(tpot, 0.5), tpot_p99_s=_quantile(tpot, 0.99), duration_s=seconds,
        transitions=len(run.transitions), level_s=run.level_s)


def meets(one: Ended, server: Server) -> bool:
    """Whether a request finished and met both objectives."""
    return (one.outcome in (OK, CUT) and one.ttft_ns is not None and one.ttft_ns <= server.ttft_s * SECOND
            and (one.tpot_ns is None or one.tpot_ns <= server.tpot_s * SECOND))


def _quantile(ordered: Sequence[int], q: float) -> float | None:
    """The nearest rank, in seconds."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] / SECOND if ordered else None


def untold(policy: Policy, told: Sequence[str] = TOLD) -> list[str]:
    """Signals that a policy names and nobody tells: conditions on them never hold."""
    named = dict.fromkeys(leaf.signal for level in policy.levels for leaf in leaves(level.condition))
    return [name for name in named if name not in told]


def compared(every: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Rows of a table with a column per run, the first cell being the row's name."""
    return [(name, *(cell(one) for one in every)) for name, cell in _ROWS]


def transition_line(told: Transition, began: str = "") -> str:
    """A transition in one line: when, what and why, on which readings."""
    readings = ", ".join(f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
                         for name, value in told.readings)
    return f"{began or format(told.t_ns / SECOND, ',.2f') + ' s'}  {told.reason}" + (f" [{readings}]" * bool(readings))


def _count(value: int) -> str:
    return f"{value:,}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _levels(one: Figures) -> str:
    return " / ".join(f"{seconds:,.0f}" for seconds in one.level_s[1:]) or "-"


_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("requests", lambda one: _count(one.requests)),
    ("finished", lambda one: _count(one.finished)),
    ("met both objectives", lambda one: f"{one.met:,} ({_percent(one.met_share)})"),
    ("of those that finished", lambda one: _percent(one.met_share_of_finished)),
    ("goodput, tokens", lambda one: _count(one.goodput_tokens)),
    ("goodput, tokens/s", lambda one: f"{one.goodput_per_s:,.1f}"),
    ("tokens generated", lambda one: _count(one.generated_tokens)),
    ("requests cut, tokens cut", lambda one: f"{one.cut:,}, {one.cut_tokens:,}"),
    ("requests shed for good", lambda one: _count(one.refused)),
    ("refusals", lambda one: _count(one.refusals)),
    ("out of memory", lambda one: _count(one.out_of_memory)),
    ("preemptions", lambda one: _count(one.preemptions)),
    ("tokens computed again", lambda one: _count(one.recomputed_tokens)),
    ("prefix hits", lambda one: _percent(one.hit_share)),
    ("blocks offloaded, fetched", lambda one: f"{one.offloaded_blocks:,}, {one.fetched_blocks:,}"),
    ("TTFT P50", lambda one: _seconds(one.ttft_p50_s)),
    ("TTFT P99", lambda one: _seconds(one.ttft_p99_s)),
    ("TPOT P50", lambda one: _seconds(one.tpot_p50_s)),
    ("TPOT P99", lambda one: _seconds(one.tpot_p99_s)),
    ("duration", lambda one: f"{one.duration_s:,.1f} s"),
    ("transitions", lambda one: _count(one.transitions)),
    ("seconds at level 1 / 2 / 3", _levels),
)
