"""``kvobs calibrate``: the largest threshold of a signal that keeps a latency within its SLO, with confidence."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvobs.cli._errors import Refused
from kvobs.cli._explain import progress
from kvobs.cli._output import print_table, say

if TYPE_CHECKING:
    from kvobs.slo.calibration import Calibration

ABSTAINED = 1


def calibrate(
        data: Annotated[Path, typer.Argument(metavar="STORE|CSV", show_default=False,
                                             help="A store, a directory of stores, or a CSV file with a header.")],
        signal: Annotated[str, typer.Option(help="A gauge of the catalog, or a column.", show_default=False)],
        latency: Annotated[str, typer.Option(
            help="kvobs.alloc.latency, gen_ai.server.time_to_first_token or gen_ai.server.time_per_output_token; or a "
                 "column, in seconds unless its name ends with _ms, _us or _ns.", show_default=False)],
        slo: Annotated[str, typer.Option(help="What the latency must not exceed.")] = "12ms",
        quantile: Annotated[str, typer.Option(help="The share of windows that must keep it.")] = "0.95",
        delta: Annotated[str, typer.Option(help="One less the confidence.")] = "0.1",
        window: Annotated[str, typer.Option(help="Maxima over windows of this width are compared, since neighbouring "
                                                 "seconds resemble each other.")] = "10s",
        where: Annotated[list[str] | None, typer.Option(metavar="ATTRIBUTE=VALUE", show_default=False,
                                                        help="Of a store, only series with this attribute.")] = None,
        html: Annotated[Path | None, typer.Option(help="Write the report as a page here.", show_default=False)] = None,
        as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False) -> None:
    """Find the threshold up to which a latency keeps its SLO, for a policy of the breaker.

    The exit code is 1 where the data do not suffice for a threshold.
    """
    from kvobs.cli._calibrate_data import collect
    from kvobs.slo.calibration import Question, breaker_name, fragment
    from kvobs.slo.calibration import calibrate as answer

    question = Question(signal=signal, latency=latency, slo_ns=_duration(slo, "--slo"), window_ns=_duration(
        window, "--window"), quantile=_share(quantile, "--quantile"), delta=_share(delta, "--delta"))
    if html is not None and os.path.realpath(html) == os.path.realpath(data):
        raise Refused("The page would take the place of the data that it is about; name another file for --html.")
    with progress() as tell:
        tell(f"Reading {data.name}")
        windows, notes = collect(data, question, where or [])
        tell("Testing thresholds")
        found = answer(windows, question)
    line = ""
    if found.threshold is not None:
        name = breaker_name(signal, _known())
        line = fragment(name, found.threshold)
        if name != signal:
            notes.append(f"The breaker has no signal {signal} of its own: report it to it as {name}.")
    if html is not None:
        _write(html, found, notes, line)
    if as_json:
        import msgspec

        print(json.dumps(msgspec.to_builtins(found) | {"notes": notes, "fragment": line or None}, indent=2,
                         allow_nan=False))
    else:
        _tell(found, notes, html, line)
    if found.threshold is None:
        raise typer.Exit(ABSTAINED)


def _tell(found: Calibration, notes: list[str], html: Path | None, line: str) -> None:
    from kvobs.slo.calibration import CHOICE_COLUMNS, choice_rows, counted

    say(counted(found))
    for note in notes:
        say(f"Note: {note}")
    print()
    print_table(CHOICE_COLUMNS, choice_rows(found))
    print()
    if found.drift is not None:
        say(found.drift.sentence)
    say(found.neighbours.sentence)
    if html is not None:
        say(f"The page is {html}.")
    print()
    say(found.sentence)
    if line:
        if found.drift is not None and found.drift.found:
            say("The threshold is marked: the data drift.")
        print()
        print(line)


def _known() -> list[str]:
    """The breaker's own signals that are numbers."""
    from kvobs.breaker import SIGNALS

    return [name for name, signal in SIGNALS.items() if not signal.words]


def _duration(text: str, option: str) -> int:
    from kvobs.config import parse_duration

    try:
        value = parse_duration(text)
    except ValueError:
        value = 0
    if value <= 0:
        raise Refused(f"{option}: {text!r} is no duration above zero; write one such as 12ms, 250us or 10s.")
    return value


def _share(text: str, option: str) -> float:
    from kvobs.config import parse_share

    try:
        value = parse_share(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1 - 1e-6:
        raise Refused(f"{option}: {text!r} is no share; from 0.000001 to 0.999999 is allowed.")
    return value


def _write(place: Path, found: Calibration, notes: list[str], line: str) -> None:
    """Write the page; whoever reads it meanwhile sees the old one or the whole new one."""
    from kvobs.slo.calibration import page

    target = place.resolve()  # a link stays
    if target.exists() and not target.is_file():
        raise Refused(f"The page cannot be written to {place}: it is no regular file.")
    beside = target.parent / f".kvobs-{secrets.token_hex(8)}"
    try:
        try:
            with beside.open("x", encoding="utf-8") as file:
                file.write(page(found, notes, line))
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"The page cannot be written to {place} ({(error.strerror or str(error)).lower()}).") from None
