"""What the demo prints of a turn. Every number is kvobs's; here they only change units."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvobs.analysis import article_fragmentation_rate, write_amplification
from kvobs.model import Turn

PLAIN_WIDTH = 150  # a pipe has no width: wide enough that no cell is cut
# Narrower than this, the columns go into two tables: sizes and times, then what was moved.
_WHOLE_WIDTH = 140
_SIZES, _MOVES = (0, 1, 2, 3, 4, 5, 11, 12), (0, 6, 7, 8, 9, 10)
_COLUMNS = ("turn", "prompt\ntokens", "new\ntokens", "KV held\nMiB", "largest\nbuffer KiB", "article's\nrate",
            "re-allo-\ncations", "written\nMiB", "copied\nMiB", "write ampli-\nfication", "migrations", "TTFT\nms",
            "per token\nms")
NOTE = ("The article's rate is (total - largest contiguous) / total, by the definition of the article that kvobs "
        "follows; many equal buffers alone drive it to 1, so it is no measure of waste.\n"
        "Write amplification is (written + copied) / written: a growing DynamicCache copies all of itself at each "
        "token.\n"
        "The article counts 0, 2 and 7 re-allocations in turns 1, 3 and 5; its hook saw other tensors than K and V. "
        "Here each pass replaces both in every layer.")


def record(turn: Turn, text: str) -> dict[str, Any]:
    """The object that ``--json`` prints for a turn; absent values are None."""
    return {
        "turn": turn.turn,
        "session": turn.session,
        "prompt_tokens": turn.prompt_tokens,
        "new_tokens": turn.new_tokens,
        "kv_bytes": turn.kv_bytes,
        "kv_largest_bytes": turn.kv_largest_bytes,
        "article_fragmentation_rate": article_fragmentation_rate(turn.kv_reserved_bytes, turn.kv_largest_bytes),
        "reallocations": turn.reallocations,
        "bytes_written": turn.bytes_written,
        "bytes_copied": turn.bytes_copied,
        "migrations": sum(buffers for _, _, buffers, _ in turn.migrations),
        "ttft_s": _seconds(turn.ttft_ns),
        "tpot_s": _seconds(turn.tpot_ns),
        "text": text,
    }


def table_of(turns: Sequence[Turn], columns: Sequence[int] = range(13)) -> Table:
    """One row per turn, of ``columns``; the title says of which model, cache and device."""
    kinds = sorted({f"{o.model}, {o.cache}, {o.dtype} on {o.device}" for o in (turn.origin for turn in turns)})
    table = Table(box=box.SIMPLE_HEAD, title_justify="left",
                  title=f"What the KV cache did, turn by turn ({'; '.join(kinds)})")
    for column in columns:
        table.add_column(_COLUMNS[column], justify="right", no_wrap=True)
    for turn in turns:
        shown = record(turn, "")
        cells = (
            str(turn.turn), str(turn.prompt_tokens), str(turn.new_tokens), _mebi(turn.kv_bytes),
            f"{turn.kv_largest_bytes / 1024:.1f}", _or_dash(shown["article_fragmentation_rate"], "{:.4f}"),
            str(turn.reallocations), _mebi(turn.bytes_written), _mebi(turn.bytes_copied),
            _or_dash(write_amplification(turn.bytes_written, turn.bytes_copied), "{:.1f}x"), str(shown["migrations"]),
            _or_dash(turn.ttft_ns, "{:.0f}", 1e-6), _or_dash(turn.tpot_ns, "{:.1f}", 1e-6))
        table.add_row(*(cells[column] for column in columns))
    return table


def print_table(turns: Sequence[Turn]) -> None:
    """The table of all turns on stdout."""
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    console.print()
    for columns in (range(13),) if console.width >= _WHOLE_WIDTH else (_SIZES, _MOVES):
        console.print(table_of(turns, columns))
    console.print(NOTE, highlight=False, markup=False)


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9


def _mebi(size: int) -> str:
    return f"{size / 1024**2:.2f}"


def _or_dash(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)
