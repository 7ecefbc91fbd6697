"""``kvobs export``: a store as Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvobs.cli._errors import Refused


def export(parquet: Annotated[Path, typer.Option("--parquet", metavar="OUT", help="Directory for the Parquet files.")],
           store: Annotated[Path | None, typer.Argument(help="A store or a directory of stores; default: the "
                                                             "configured one.")] = None,
           named: Annotated[Path | None, typer.Option("--store", help="The same, as run and bridge have it.",
                                                      show_default=False)] = None) -> None:
    """Write what a store holds as Parquet files."""
    from kvobs import config

    if store is not None and named is not None:
        raise Refused("The store is named twice: as an argument and by --store.")
    found = store or named or config.load().store
    if found is None:
        raise Refused("The store is off in this configuration; name the store to export.")
    if not found.exists():
        raise Refused(f"There is no store at {found}.")
    from kvobs.store import StoreError, export_parquet

    try:
        written = export_parquet(found, parquet)
    except StoreError as error:
        raise Refused(str(error)) from error
    for path in written:
        print(path)
