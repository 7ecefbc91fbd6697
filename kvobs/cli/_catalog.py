"""``kvobs catalog``: every metric, its names, unit and meaning."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvobs.cli._errors import Refused
from kvobs.cli._output import print_table


def catalog(markdown: Annotated[bool, typer.Option("--markdown", help="As the Markdown table of the docs.")] = False,
            as_json: Annotated[bool, typer.Option("--json", help="As a JSON array.")] = False) -> None:
    """Show every metric: its OpenTelemetry and Prometheus names, unit, attributes and meaning."""
    import msgspec

    from kvobs import catalog as metrics

    if markdown and as_json:
        raise Refused("The options --markdown and --json exclude each other.")
    if markdown:
        print(metrics.markdown(), end="")
    elif as_json:
        rows = [{**msgspec.to_builtins(row), "prometheus_name": metrics.prometheus_name(row)} for row in metrics.ROWS]
        print(json.dumps(rows, indent=2))
    else:
        print_table(("metric", "prometheus", "kind", "unit", "meaning"),
                    [(row.name, metrics.prometheus_name(row), row.kind, row.unit, row.meaning)
                     for row in metrics.ROWS])
