"""``kvobs dashboards``: Grafana's boards, Prometheus's rules and Alertmanager's routes as files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvobs.cli._errors import Refused
from kvobs.cli._output import say


def dashboards(out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the files; others in it "
                                                                             "stay as they are.")],
               form: Annotated[str, typer.Option("--form", help="provisioned, with a variable for the data source, or "
                                                                "grafana.com, which asks for it at import.")]
               = "provisioned",
               runbooks: Annotated[str, typer.Option("--runbooks", metavar="URL", help="Where the runbooks are: alerts "
                                                                                       "link to them.")] = "runbooks",
               boards: Annotated[str, typer.Option("--dashboards", metavar="URL", help="Grafana's address: alerts link "
                                                                                      "to boards there.")]
               = "") -> None:
    """Write Grafana's boards, the runbooks and, for the configured objectives, Prometheus's rules."""
    from kvobs import config
    from kvobs import dashboards as generated
    from kvobs.dashboards import rules

    chosen = next((one for one in generated.FORMS if one == form), None)
    if chosen is None:
        raise Refused(f"The form is {form!r}; allowed are {' and '.join(generated.FORMS)}.")
    for option, url in (("--runbooks", runbooks), ("--dashboards", boards)):
        if not url.isprintable() or any(letter.isspace() for letter in url):
            raise Refused(f"The address that {option} gives is {url!r}; allowed is a URL without blanks.")
    files = generated.boards(chosen) | {f"runbooks/{name}": text for name, text in generated.runbooks().items()}
    try:
        files |= rules.files(config.load().objectives, runbooks.rstrip("/"), boards.rstrip("/"))
    except ValueError as error:  # a rule of these objectives could never fire
        raise Refused(str(error)) from error
    try:
        write_all(out, files)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise Refused(f"The dashboards cannot be written to {out}: {reason}.") from error
    for name in files:
        say(str(out / name))


def write_all(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files or none: each under a temporary name beside its place, then all are renamed.

    Raises:
        OSError: nothing was replaced, unless the renaming itself failed.
    """
    made: list[tuple[str, Path]] = []
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(21, f"{path} is a directory", str(path))
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            made.append((temporary, path))
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
        while made:
            temporary, path = made[0]
            os.replace(temporary, path)
            made.pop(0)
    finally:
        for temporary, _ in made:
            Path(temporary).unlink(missing_ok=True)
