"""``kvobs run -- CMD``: become the command, with kvobs armed in it and in its Python children.

The command replaces this process, so that exit codes, signals, tracebacks and the terminal are the command's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvobs import config
from kvobs.cli._errors import Refused
from kvobs.cli._interpreter import unseen_flags

BOOTSTRAP = Path(__file__).resolve().parent.parent / "_bootstrap"
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as shells say it
_MEANING = {setting.name: f"{setting.meaning}: {setting.allowed}" for setting in config.SETTINGS}


def _setting(name: str) -> Any:
    return typer.Option("--" + name.replace("_", "-"), help=_MEANING[name], show_default=False)


def run(ctx: typer.Context,
        profile: Annotated[str | None, _setting("profile")] = None,
        store: Annotated[str | None, _setting("store")] = None,
        store_max_bytes: Annotated[str | None, _setting("store_max_bytes")] = None,
        prometheus: Annotated[str | None, _setting("prometheus")] = None,
        otlp: Annotated[str | None, _setting("otlp")] = None,
        session_ids: Annotated[str | None, _setting("session_ids")] = None,
        window_ms: Annotated[str | None, _setting("window_ms")] = None,
        deep: Annotated[bool, typer.Option("--deep", help=_MEANING["deep"].partition(":")[0])] = False,
        overhead_percent: Annotated[str | None, _setting("overhead_percent")] = None,
        virtual_gpu: Annotated[str | None, _setting("virtual_gpu")] = None,
        virtual_latency: Annotated[str | None, _setting("virtual_latency")] = None,
        breaker: Annotated[str | None, _setting("breaker")] = None,
        breaker_policy: Annotated[str | None, _setting("breaker_policy")] = None,
        config_file: Annotated[str | None, typer.Option("--config", help="a TOML file of settings")] = None) -> None:
    """Run a command and observe it: kvobs run -- python serve.py."""
    given = {"profile": profile, "store": store, "store_max_bytes": store_max_bytes, "prometheus": prometheus,
             "otlp": otlp, "session_ids": session_ids, "window_ms": window_ms,
             "deep": "on" if deep else None, "overhead_percent": overhead_percent,
             "virtual_gpu": virtual_gpu, "virtual_latency": virtual_latency,
             "breaker": breaker, "breaker_policy": breaker_policy}
    command = ctx.args  # as given: Typer would convert an argument that is declared
    if not command:
        raise Refused("There is no command to run; write it after --, as in: kvobs run -- python serve.py.")
    environ = child_environment(os.environ, {name: text for name, text in given.items() if text is not None},
                                config_file)
    if flags := unseen_flags(command, environ):
        print(f"kvobs: {command[0]} {' '.join(flags)} does not run the sitecustomize of PYTHONPATH, so this process is "
              "not observed.", file=sys.stderr)
    if config.load(environ).virtual_gpu:
        _prepare_virtual()
    become(command, environ)


def _prepare_virtual() -> None:
    """Compile the virtual GPU before the command needs it.

    Raises:
        Refused: it cannot be had.
    """
    from kvobs import virtual

    if virtual.why_not(build=False) is None and not virtual.compiled():
        print("kvobs: compiling the virtual GPU, once for this version of torch (half a minute).", file=sys.stderr)
    reason = virtual.why_not()
    if reason is not None:
        raise Refused(reason)


def child_environment(environ: Mapping[str, str], given: Mapping[str, str],
                      config_file: str | None = None) -> dict[str, str]:
    """The command's environment: settings as ``KVOBS_*`` and the bootstrap directory first on PYTHONPATH.

    Raises:
        kvobs.config.ConfigError: a setting, given or inherited, was refused.
    """
    child = dict(environ)
    if config_file is not None:
        child[config.FILE_VARIABLE] = config_file
    loaded = config.load(child, **given)
    child.update({config.ENV_PREFIX + name.upper(): text for name, text in given.items()})
    # The command may change its directory before it reads them.
    if child.get(config.FILE_VARIABLE):
        child[config.FILE_VARIABLE] = os.path.abspath(child[config.FILE_VARIABLE])
    if loaded.store is not None and not loaded.store.is_absolute():
        child[config.ENV_PREFIX + "STORE"] = str(loaded.store.absolute())
    if loaded.breaker != "off":
        from kvobs.breaker import PRESETS, load_policy

        load_policy(loaded.breaker_policy)
        if loaded.breaker_policy not in PRESETS:
            child[config.ENV_PREFIX + "BREAKER_POLICY"] = os.path.abspath(loaded.breaker_policy)
    before = [entry for entry in child.get("PYTHONPATH", "").split(os.pathsep) if entry != str(BOOTSTRAP)]
    # An empty PYTHONPATH means none, but an empty entry beside others means the current directory.
    child["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *(before if before != [""] else [])])
    return child


def become(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Replace this process by ``command``; returns never.

    Raises:
        Refused: the command does not exist (127) or cannot be executed (126).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two and an ignored signal stays ignored in the command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environ)
    except FileNotFoundError:
        raise Refused(f"The command {command[0]!r} was not found.", NOT_FOUND) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Refused(f"The command {command[0]!r} cannot be executed: {reason}.", NOT_EXECUTABLE) from None
