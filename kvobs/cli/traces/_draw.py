"""Rows on a terminal of any width, or one plain line each where nothing wraps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from kvobs.cli._output import plain
from kvobs.cli.traces._rows import Row, duration_text, offset_text

COLUMN = 13  # of the offset, and of the duration
NARROW = 70  # below it, times stand behind the name
LEAST = 16
_STYLES = {"span": "bold", "failed": "bold red", "event": "cyan", "attribute": "dim"}
_ASCII = str.maketrans({"│": "|", "├": "|", "└": "`", "─": "-", "•": "*", "…": "~", "µ": "u"})


def draw(rows: Iterable[Row]) -> None:
    """Print rows on stdout: in colour and folded on a terminal, one line each elsewhere."""
    if not sys.stdout.isatty():
        for row in rows:
            print(encodable(line(row)))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for row in rows:
        for guide, text in folded(row, console.width):
            said = Text.assemble((encodable(guide), "dim"), (encodable(text), _STYLES[row.kind]))
            console.print(said, no_wrap=True, overflow="ignore", crop=False)


def line(row: Row) -> str:
    """The row as one line."""
    return f"{_times(row)}{row.guide}{plain(row.label)}".rstrip()


def folded(row: Row, width: int) -> Iterator[tuple[str, str]]:
    """The row's lines for a terminal, each as (what stands before the text, text), at most ``width`` cells wide.

    Nothing is left out, however narrow; below ``LEAST`` cells lines are as wide as that.
    """
    from rich.cells import cell_len

    width = max(width, LEAST)
    label = plain(row.label)
    before, blank = _times(row), " " * 2 * COLUMN + "  "
    if width < NARROW:
        before = blank = ""
        told = [text for text in (offset_text(row.offset_ns), duration_text(row.duration_ns)) if text]
        label += f" ({', '.join(told)})" if told else ""
    guide, rest = row.guide, row.rest
    if len(guide) + len(before) > width // 2 + len(before) // 2:
        guide, rest = f"[{row.depth}] ", ""
    first, after = before + guide, blank + rest
    if len(after) > width // 2 + len(blank) // 2:
        after = blank
    room, at = width - len(first), first
    begin = used = 0
    for place, letter in enumerate(label):
        used += cell_len(letter)
        if used > room and place > begin:
            space = label.rfind(" ", begin + room // 2, place) + 1  # none: within a word
            yield at, label[begin:space or place]
            begin, at, room = space or place, after, width - len(after)
            used = cell_len(label[begin:place + 1])
    yield at, label[begin:]


def encodable(text: str) -> str:
    """The text with ASCII for what draws, where stdout's encoding has no such letters."""
    try:
        "│├└─•…µ".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return text.translate(_ASCII)
    return text


def _times(row: Row) -> str:
    return f"{offset_text(row.offset_ns):>{COLUMN}}{duration_text(row.duration_ns):>{COLUMN}}  "
