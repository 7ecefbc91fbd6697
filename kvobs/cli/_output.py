"""What commands print: framed on a terminal, one plain line per row when piped, and nothing that could act there."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


def plain(text: str) -> str:
    """One line of text: what controls a terminal, breaks the line or turns its direction is shown as an escape.

    Names of files and of frames are whatever somebody wrote.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def say(text: str) -> None:
    """Print one line, ``plain``."""
    print(plain(text))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``columns``; cells are shown as they are, never as markup or as more than one line."""
    rows = [[plain(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():  # nothing wraps or is cut: grep and less see whole lines
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for row in (columns, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, and nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(escape(what), total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def prepare_streams() -> None:
    """Give a closed standard stream /dev/null, and let none fail on a letter that its encoding lacks.

    Without it a file that is opened later takes the number of the closed stream, and output would go there.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def give_up_stdout() -> None:
    """After a write to it failed: what it still holds is not tried again at the end."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
