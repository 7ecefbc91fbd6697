"""``kvobs doctor``: what can be observed here, what not, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvobs.cli._output import print_table


def doctor(as_json: Annotated[bool, typer.Option("--json", help="As a JSON array.")] = False) -> None:
    """Say what can be observed here, what not and why, one line each."""
    from kvobs import config
    from kvobs.cli import _probes

    findings = _probes.probe(config.load(), origins=config.origins())
    if as_json:
        print(json.dumps([{"subject": fact.subject, "available": fact.available, "reason": fact.reason}
                          for fact in findings], indent=2))
    else:
        print_table(("subject", "here", "why"),
                    [(fact.subject, "yes" if fact.available else "no", fact.reason) for fact in findings])
