"""``kvobs demo``: a real small model, eight turns, and what its KV cache did."""

from __future__ import annotations

from typing import Annotated

import typer

from kvobs.cli._errors import Refused


def demo(turns: Annotated[int, typer.Option(min=1, help="How many turns the conversation has.")] = 8,
         as_json: Annotated[bool, typer.Option("--json", help="One JSON object per turn on stdout.")] = False) -> int:
    """Observe a real conversation with a small model on this machine's CPU."""
    try:
        from kvobs.lab.demo import run
    except ImportError as error:
        raise Refused(f"The demo needs the module {error.name!r}; "
                      "install it with: pip install 'kvobs[torch,lab,otel,prometheus]'.") from error
    return run(turns=turns, as_json=as_json)
