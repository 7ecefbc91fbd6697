"""``kvobs trace``: one trace as a tree, from Jaeger or from the store."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from kvobs import config
from kvobs.cli._errors import Refused
from kvobs.cli._output import say

SPANS = 1000
_ALLOWED = "allowed are 32 hexadecimal digits, or 16, not all of them 0"


def trace(trace_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="The trace's id: 32 hexadecimal digits, "
                                                         "or 16.", show_default=False)] = None,
          last: Annotated[bool, typer.Option("--last", help="The trace of the newest turn in the store.")] = False,
          jaeger: Annotated[str | None, typer.Option(metavar="URL", help="Jaeger's web address, or off for the store.",
                                                     show_default="the configured one")] = None,
          store: Annotated[Path | None, typer.Option(help="A store or a directory of stores.",
                                                     show_default="the configured one")] = None,
          spans: Annotated[int, typer.Option(help="Print at most so many spans; 0 prints all.", min=0)] = SPANS,
          attributes: Annotated[bool, typer.Option("--attributes", help="Print the attributes of spans too.")] = False,
          as_json: Annotated[bool, typer.Option("--json", help="As one JSON object, with all spans.")] = False) -> None:
    """Print a trace as a tree with offsets, durations and events: kvobs trace ID, or kvobs trace --last."""
    if (trace_id is None) != last:
        raise Refused("Name a trace, or ask for the newest one with --last, and not both.")
    known = None if trace_id is None else checked(trace_id)
    loaded = config.load() if jaeger is None else config.load(jaeger_url=jaeger)
    address = "" if jaeger is None and store is not None else loaded.jaeger_url
    place = store if store is not None else loaded.store
    if place is None and (last or not address):
        raise Refused("The store is off in this configuration; name one with --store"
                      + (", or a trace and a Jaeger." if last else ", or a Jaeger with --jaeger URL."))
    from kvobs.cli import traces

    try:
        if known is None:
            known = traces.last(_there(place), sampled=bool(address))
        found = traces.fetch(address, known) if address else traces.read(_there(place), known)
    except traces.TraceError as error:
        raise Refused(str(error)) from None
    if as_json:
        print(json.dumps(traces.document(found), indent=2))
        return
    say(traces.title(found))
    traces.draw(traces.rows(found, spans, attributes=attributes))
    if spans and len(found.spans) > spans:
        say(f"{len(found.spans) - spans:,} further spans are not shown; --spans 0 prints all.")
    for note in found.notes:
        say(note)
    if address:
        say(f"{address}/trace/{known}")


def checked(trace_id: str) -> str:
    """The id in lower case.

    Raises:
        Refused: it is no trace's id.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{16}|[0-9a-fA-F]{32}", trace_id, re.ASCII) or not trace_id.strip("0"):
        raise Refused(f"The trace's id is {trace_id[:100]!a}; {_ALLOWED}.")
    return trace_id.lower()


def _there(place: Path | None) -> Path:
    if place is None or not place.exists():
        raise Refused(f"There is no store at {place}; name one with --store, or a Jaeger with --jaeger URL.")
    return place
