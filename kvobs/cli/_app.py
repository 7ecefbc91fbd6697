"""The application: its commands, and how every refusal becomes one sentence and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

from kvobs import __version__
from kvobs.cli._breaker import breaker
from kvobs.cli._breaker_simulate import simulate
from kvobs.cli._bridge import bridge
from kvobs.cli._calibrate import calibrate
from kvobs.cli._catalog import catalog
from kvobs.cli._dashboards import dashboards
from kvobs.cli._demo import demo
from kvobs.cli._doctor import doctor
from kvobs.cli._errors import Refused
from kvobs.cli._explain import explain
from kvobs.cli._export import export
from kvobs.cli._k8s_events import k8s_events
from kvobs.cli._output import give_up_stdout, plain, prepare_streams
from kvobs.cli._run import run
from kvobs.cli._trace import trace
from kvobs.cli._view import view
from kvobs.cli._whatif import whatif
from kvobs.config import ConfigError

REFUSED = 2
app = typer.Typer(add_completion=False, rich_markup_mode=None, help="KV-cache observability for LLM inference.")
app.command(options_metavar="[OPTIONS] -- COMMAND [ARGS]...",
            context_settings={"allow_extra_args": True, "allow_interspersed_args": False})(run)
for command in (demo, view, explain, whatif, calibrate, bridge, doctor, catalog, export, dashboards, trace):
    app.command()(command)
app.command("k8s-events")(k8s_events)


breaker.command()(simulate)
app.add_typer(breaker, name="breaker")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvobs {__version__}")
        raise typer.Exit


@app.callback()
def _kvobs(version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True,
                                                 callback=_show_version)] = False) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (2 after a refusal, with one sentence on stderr)."""
    prepare_streams()
    try:
        code = get_command(app).main(arguments, prog_name="kvobs", standalone_mode=False)
        sys.stdout.flush()
    except (Refused, ConfigError) as error:
        return _refuse(str(error), getattr(error, "exit_code", REFUSED))
    except typer.Abort:
        return _refuse("Interrupted.", 130)
    except OSError as error:
        if error.filename is not None:  # not from a stream
            raise
        give_up_stdout()
        return 1 if isinstance(error, BrokenPipeError) else _refuse(
            f"The output cannot be written ({(error.strerror or str(error)).lower()}).", REFUSED)
    except Exception as error:
        # Usage errors have no public common class over the versions of Typer that are supported.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        return _refuse(error.format_message(), REFUSED)
    return code if isinstance(code, int) else 0


def _refuse(sentence: str, exit_code: int) -> int:
    sentence = plain(" ".join(sentence.split()))
    print(f"kvobs: {sentence}" + ("" if sentence.endswith((".", "?", "!", ")")) else "."), file=sys.stderr)
    return exit_code
