"""What the demo prints of its turns. Every number is kvobs's; here they only change units."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvobs.allocator.forecast import NextStep
from kvobs.analysis import article_fragmentation_rate, write_amplification
from kvobs.lab.demo._allocator import Held
from kvobs.model import Migration, Turn

WIDTH = 100  # of a pipe, which has none
NOTE = (
    "Article's rate (S5): (allocated - largest free) / allocated; the article has 0.213 and 0.600 in its turns 6 and 7 "
    "(12,480 and 13,120 MiB, of which 9,824 and 5,248 in one piece). It is near 1 whenever all is in use. GMLake: 1 - "
    "peak active / peak reserved. Unused: (reserved - allocated) / reserved. None of the three tells what becomes of a "
    "request: that is the next step's verdict (estimated: every live cache of the device grows by one token; the "
    "model's own temporaries are not known).\n"
    "Re-allocations (S6): the article has 0, 2 and 7 in turns 1, 3 and 5, calling 0, 100 and 57 % migrations; "
    "its hook saw other tensors than K and V. Here each pass replaces both in every layer. Write amplification: "
    "(written + copied) / written. Moved: K and V buffers that changed device since the session's last turn. Prompt "
    "tokens: the whole conversation so far. TTFT: time to the first token; ms per token: of the later ones. Rows are "
    "in order of time.")
ON_CPU = "On the CPU there is no caching allocator: reserved and allocated are the C heap's, the rest is absent."


def record(turn: Turn, text: str, conversation: str, held: Held, step: NextStep,
           migrations: Sequence[Migration]) -> dict[str, Any]:
    """The object that ``--json`` prints for a turn; absent values are None.

    ``held`` is the allocator of the turn's device after it, ``step`` the verdict on what comes next there,
    ``migrations`` what of the turn's cache has moved since the turn before.
    """
    return {
        "conversation": conversation,
        "turn": turn.turn,
        "session": turn.session,
        "device": turn.origin.device,
        "prompt_tokens": turn.prompt_tokens,
        "new_tokens": turn.new_tokens,
        "kv_bytes": turn.kv_bytes,
        "kv_largest_bytes": turn.kv_largest_bytes,
        "article_fragmentation_rate": article_fragmentation_rate(turn.kv_reserved_bytes, turn.kv_largest_bytes),
        "reallocations": turn.reallocations,
        "bytes_written": turn.bytes_written,
        "bytes_copied": turn.bytes_copied,
        "migrations": sum(move.buffers for move in migrations),
        "bytes_migrated": sum(move.bytes for move in migrations),
        "ttft_s": _seconds(turn.ttft_ns),
        "tpot_s": _seconds(turn.tpot_ns),
        "allocator": msgspec.structs.asdict(held),
        "next_step": {"verdict": step.verdict and str(step.verdict), "estimated": step.estimated,
                      "sentence": step.sentence},
        "model": turn.origin.model,
        "text": text,
    }


def tables_of(records: Sequence[dict[str, Any]]) -> tuple[Table, Table]:
    """What ``record`` made of the turns, one row each: what the allocator held (S5), what the KV cache did (S6)."""
    model = ", ".join(dict.fromkeys(one["model"] for one in records))
    allocator = _table(f"What the allocator held after each turn ({model})", (
        "turn", "session", "device", "reserved\nMiB", "allocated\nMiB", "largest\nfree MiB", "article\nrate",
        "GMLake", "unused", "next\nstep"))
    cache = _table("What each turn did to its KV cache", (
        "turn", "session", "prompt\ntokens", "new\ntokens", "KV held\nMiB", "re-\nallocs", "copied\nMiB",
        "write\nampl.", "moved\nbufs", "moved\nMiB", "TTFT\nms", "ms per\ntoken"))
    for one in records:
        held, step = one["allocator"], one["next_step"]
        allocator.add_row(
            str(one["turn"]), one["conversation"], one["device"], _mebi(held["reserved_bytes"]),
            _mebi(held["allocated_bytes"]), _mebi(held["largest_free_bytes"]),
            *(_or_dash(held[name], "{:.3f}") for name in ("article_rate", "gmlake", "unused_share")),
            step["verdict"] or "-")
        cache.add_row(
            str(one["turn"]), one["conversation"], str(one["prompt_tokens"]), str(one["new_tokens"]),
            _mebi(one["kv_bytes"]), str(one["reallocations"]), _mebi(one["bytes_copied"]),
            _or_dash(write_amplification(one["bytes_written"], one["bytes_copied"]), "{:.0f}"),
            str(one["migrations"]), _mebi(one["bytes_migrated"]), _or_dash(one["ttft_s"], "{:.0f}", 1e3),
            _or_dash(one["tpot_s"], "{:.0f}", 1e3))
    return allocator, cache


def print_tables(records: Sequence[dict[str, Any]], *, on_cpu: bool) -> None:
    """Both tables on stdout, and what their columns mean."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables_of(records):
        console.print()
        console.print(table)
    console.print(f"{ON_CPU}\n{NOTE}" if on_cpu else NOTE, highlight=False, markup=False)


def _table(title: str, columns: Sequence[str]) -> Table:
    # One blank between columns: both tables fit 80 characters.
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 0), pad_edge=False,
                  show_edge=False)
    for column in columns:
        left = column in ("session", "device")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    return table


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9


def _mebi(size: int | None) -> str:
    return "-" if size is None else f"{size / 1024**2:.1f}"


def _or_dash(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
