"""Progress on stderr: a moving line on a terminal, one plain line per stage elsewhere. Never on stdout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

Advance = Callable[[int], None]


def say(sentence: str) -> None:
    """One line on stderr."""
    print(sentence, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stage(text: str, total: int | None = None) -> Iterator[Advance]:
    """Show that something lasts.

    Args:
        text: what happens, as in "Downloading the model".
        total: when the yielded function is told this number, the stage is complete; None if that is not known.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        say(f"{text} ...")
        yield lambda done: None
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
    if total is not None:
        columns[2:2] = [BarColumn(), TaskProgressColumn()]
    # Redirection would send what is printed on stdout meanwhile to stderr.
    with Bars(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bars:
        task = bars.add_task(text, total=total)
        yield lambda done: bars.update(task, completed=done)
