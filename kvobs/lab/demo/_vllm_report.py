"""What vLLM's own metrics said beside what happened, and what each session got. Numbers are theirs and kvobs's."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvobs.lab.demo import _vllm_script as script
from kvobs.lab.demo._vllm_process import Told
from kvobs.model import RequestPhase, Turn
from kvobs.store import StoreReader, phases, preemptions

WIDTH = 100  # of a pipe, which has none
NOTE = (
    "Twice: tokens computed a second time after a preemption. Blocks: held when the turn ended. TTFT: time from the "
    "request to its first token, its wait for blocks included. Of each prompt, cached is what the prefix cache had.")


class Figure(msgspec.Struct, frozen=True):
    """One line of the first table: values by turn, what is shown of them, and why the two differ.

    ``engine`` is absent where vLLM has no such metric.
    """

    name: str
    engine: Any
    engine_text: str
    happened: Any
    happened_text: str
    why: str


class Session(msgspec.Struct, frozen=True):
    """One turn of one session, as kvobs recorded it; times in seconds."""

    session: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    preemptions: int
    recomputed_tokens: int
    blocks: int


def figures(told: Told, store: Path) -> list[Figure]:
    """What vLLM said beside what kvobs saw, from what the process told and stored."""
    reader = StoreReader(store, processes=[told.process])
    names = ("kvobs.kv.preemptions", "kvobs.kv.block.failures", "kvobs.kv.admission.failures")
    preempted, failed, waiting = (_grown([_kvobs(turn, name) for turn in told.turns]) for name in names)
    evicted = _grown([_kvobs(turn, "kvobs.kv.block.evictions", reason="pressure") for turn in told.turns])
    again = {cause: _grown([_kvobs(turn, "kvobs.kv.recomputed", cause=cause) for turn in told.turns])
             for cause in ("preempted", "evicted")}
    sampled = _engine(told, "vllm:kv_block_lifetime_seconds_count")
    counted = _engine(told, script.PREEMPTIONS)
    return [
        _usage(told),
        Figure("Preemptions", counted, _sum(counted), preempted, _sum(preempted),
               _late(told.counted, [one.wall_ns for one in preemptions(reader)])),
        Figure("Failed allocations", None, "-", failed, _sum(failed),
               f"vLLM does not count them: its scheduler tries again in the next step. {sum(waiting):,} were of "
               "waiting requests; for each of the others one that ran was preempted."),
        Figure("Evicted blocks", sampled, _sum(sampled), evicted, _sum(evicted),
               "vLLM's sampler, off by default and here made to follow every block, takes a block that had nothing "
               "cached for evicted when it is handed out again."),
        _prefix(told),
        Figure("Tokens computed twice", None, "-", again,
               _sum([sum(pair) for pair in zip(*again.values(), strict=True)]),
               f"vLLM does not count them. {sum(again['preempted']):,} were lost in preemptions, at least "
               f"{sum(again['evicted']):,} in evicted blocks of conversations that went on."),
    ]


def sessions(told: Told, store: Path) -> list[Session]:
    """Every turn of every session, in the order in which the sessions began."""
    reader = StoreReader(store, processes=[told.process])
    requests: dict[str, list[RequestPhase]] = {}
    for stored in phases(reader):
        requests.setdefault(stored.record.request, []).append(stored.record)
    lives: dict[str, list[list[RequestPhase]]] = {}
    for life in sorted(requests.values(), key=lambda life: life[0].start_ns):
        lives.setdefault(life[0].session, []).append(life)
    order = list(script.DIALOGUES)
    turns = sorted((stored.record for stored in reader.turns() if stored.record.session in lives),
                   key=lambda turn: (order.index(turn.session), turn.turn))
    return [_session(turn, lives[turn.session][turn.turn - 1]) for turn in turns]


def print_json(told: Told, lines: Sequence[Figure], rows: Sequence[Session]) -> None:
    """One object per figure and one per turn of a session."""
    for line in lines:
        print(json.dumps({"kind": "figure", "figure": line.name, "vllm": line.engine, "kvobs": line.happened,
                          "why": line.why}))
    for row in rows:
        print(json.dumps({"kind": "turn", "vllm_version": told.version, **msgspec.structs.asdict(row)}), flush=True)


def print_tables(lines: Sequence[Figure], rows: Sequence[Session]) -> None:
    """Both tables on stdout, and what their columns mean."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    said = _table("What vLLM's own metrics said, and what happened (in brackets: first turns + second turns)")
    for name in ("", "vLLM says", "what happened", "why they differ"):
        said.add_column(name, max_width=None if name.startswith("why") else 24)
    for line in lines:
        said.add_row(line.name, line.engine_text, line.happened_text, line.why, end_section=True)
    got = _table("What each session got")
    for name in ("session", "turn", "prompt\ntokens", "of it\ncached", "new\ntokens", "TTFT\ns", "ms per\ntoken",
                 "pre-\nempted", "tokens\ntwice", "blocks"):
        got.add_column(name, justify="left" if name == "session" else "right", no_wrap=True)
    for row in rows:
        got.add_row(row.session, str(row.turn), str(row.prompt_tokens), str(row.cached_tokens), str(row.new_tokens),
                    _or_dash(row.ttft_s, "{:.1f}"), _or_dash(row.tpot_s, "{:.0f}", 1e3), str(row.preemptions),
                    str(row.recomputed_tokens), str(row.blocks))
    for table in (said, got):
        console.print()
        console.print(table)
    console.print(NOTE, highlight=False, markup=False)


def _usage(told: Told) -> Figure:
    share = _states(told, "vllm:kv_cache_usage_perc")
    states = {state: [int(_kvobs(turn, "kvobs.kv.blocks", state=state)) for turn in told.turns]
              for state in ("used", "cached", "free", "pinned")}
    first = {state: values[0] for state, values in states.items()}
    return Figure(
        "The pool after the first turns", share, "-" if share is None else f"{100 * share[0]:.0f} % used", states,
        f"{first['used']} used, {first['cached']} cached, {first['free']} free, {first['pinned']} pinned",
        "vLLM counts a block that no request holds as free, though it has tokens that the next turn can reuse and that "
        "are lost when it is given away.")


def _prefix(told: Told) -> Figure:
    hits, queries = (_engine(told, f"vllm:prefix_cache_{name}_total") for name in ("hits", "queries"))
    found = {f"{kind}_{what}": _grown([_kvobs(turn, f"kvobs.prefix.{what}", admission=kind) for turn in told.turns])
             for kind in ("first", "resumed") for what in ("hit", "queried")}
    engine = None if hits is None or queries is None else {"hit": hits, "queried": queries}
    first, resumed = (f"{sum(found[f'{kind}_hit']):,} of {sum(found[f'{kind}_queried']):,}"
                      for kind in ("first", "resumed"))
    return Figure(
        "Prompt tokens found in the prefix cache", engine,
        "-" if hits is None or queries is None else f"{sum(hits):,} of {sum(queries):,}", found,
        f"{first}, and {resumed} when preempted requests came back",
        "vLLM leaves out look-ups of requests that were preempted before.")


def _late(counted: Sequence[int], happened: Sequence[int]) -> str:
    """How long vLLM's counter of preemptions stood behind, at worst."""
    delays = [(told - wall) / 1e9 for told, wall in zip(counted, sorted(happened), strict=False)]
    missing = len(happened) - len(counted)
    late = f"up to {max(delays):.1f} s late here" if delays else "late"
    return (f"vLLM counts a preemption when its victim has a token again, {late}"
            + (f", and {missing} not at all" if missing > 0 else "")
            + "; kvobs when it happens, with the victim and who wanted its blocks.")


def _session(turn: Turn, life: Sequence[RequestPhase]) -> Session:
    token_bytes = turn.kv_reserved_bytes / (script.POOL_BLOCKS * script.BLOCK_TOKENS)
    needed = turn.prompt_tokens - turn.cached_tokens + turn.new_tokens - 1  # the last token is not fed back
    return Session(turn.session, turn.turn, turn.prompt_tokens, turn.cached_tokens, turn.new_tokens,
                   _seconds(turn.ttft_ns), _seconds(turn.tpot_ns), sum(phase.phase == "preempted" for phase in life),
                   round(turn.bytes_written / token_bytes) - needed, life[-1].blocks)


def _kvobs(turn: dict[str, Any], metric: str, **wanted: str) -> float:
    """The sum of a metric's points that have these attributes."""
    found: float = sum(value for name, attributes, value in turn["kvobs"]
                       if name == metric and wanted.items() <= attributes.items())
    return found


def _states(told: Told, name: str) -> list[float] | None:
    """A metric of vLLM's after each turn; None where it has none of that name."""
    found = [turn["engine"].get(name) for turn in told.turns]
    return None if None in found else found


def _engine(told: Told, name: str) -> list[int] | None:
    """How much a counter of vLLM's grew in each turn."""
    found = _states(told, name)
    return None if found is None else _grown(found)


def _grown(totals: Sequence[float]) -> list[int]:
    return [round(after - before) for before, after in zip([0.0, *totals], totals, strict=False)]


def _sum(by_turn: Sequence[int] | None) -> str:
    return "-" if by_turn is None else f"{sum(by_turn):,} ({' + '.join(f'{one:,}' for one in by_turn)})"


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False,
                 show_edge=False)


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9


def _or_dash(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
