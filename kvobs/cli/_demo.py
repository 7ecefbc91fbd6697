"""``kvobs demo``: a real small model, eight turns, and what its KV cache did."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from kvobs.cli._errors import Refused

_NEEDED = ("torch", "transformers", "gguf", "accelerate")


def demo(turns: Annotated[int, typer.Option(help="How many turns the conversation has.")] = 8,
         as_json: Annotated[bool, typer.Option("--json", help="One JSON object per turn on stdout.")] = False,
         deep: Annotated[bool, typer.Option("--deep", help="Also sample attention (see the live view).")] = False,
         ) -> int:
    """Observe a real conversation with a small model on this machine's CPU."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise Refused(f"The demo needs {', '.join(missing)}; install with: "
                      "pip install 'kvobs[torch,lab,otel,prometheus]'.")
    from kvobs.lab.demo import run

    return run(turns=turns, as_json=as_json, deep=deep)
