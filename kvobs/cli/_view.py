"""``kvobs view``: the live view of a store, served on this machine by Streamlit.

The command becomes Streamlit, so that it ends as it does. The view reads the store and writes nothing to it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvobs import config
from kvobs.cli._errors import Refused

HOST, PORT = "127.0.0.1", 8501
_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel, and in the source tree.
PLACES = (_PACKAGE / "_app" / "streamlit_app", _PACKAGE.parent / "streamlit_app")


def view(store: Annotated[Path | None, typer.Argument(help="A store or a directory of stores.",
                                                      show_default="the configured one")] = None,
         port: Annotated[int | None, typer.Option(help="A port of 127.0.0.1; 0 takes a free one.", min=0, max=65535,
                                                  show_default=str(PORT))] = None) -> None:
    """Show what a store holds in the browser, live: kvobs view [STORE]."""
    loaded = config.load()
    if missing := [name for name in ("streamlit", "pandas", "altair") if find_spec(name) is None]:
        raise Refused(f"The live view needs {' and '.join(missing)}; install with: pip install 'kvobs[app]'.")
    place = store if store is not None else loaded.store
    if place is None:
        raise Refused("The setting 'store' is off; name a store or a directory of stores.")
    if store is not None:
        _check(store)
    chosen = _port(port)
    taken = f" (port {PORT} is taken)" if port is None and chosen != PORT else ""
    print(f"The live view of {place} is at http://{HOST}:{chosen}{taken}", flush=True)
    os.execve(sys.executable, command(app(), place, chosen), environment(os.environ))


def app() -> Path:
    """The script that Streamlit runs.

    Raises:
        Refused: this installation has none.
    """
    for folder in PLACES:
        if (folder / "app.py").is_file():
            return folder / "app.py"
    raise Refused("This installation of kvobs has no live view; install it from its wheel.")


def command(script: Path, store: Path, port: int) -> list[str]:
    """Streamlit's command line: loopback only, no browser, nothing sent anywhere."""
    options = {"server.address": HOST, "server.port": str(port), "server.headless": "true",
               "browser.gatherUsageStats": "false", "client.toolbarMode": "minimal", "logger.level": "warning",
               "server.fileWatcherType": "none", "client.showSidebarNavigation": "true",
               "browser.serverAddress": HOST, "global.developmentMode": "false"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, "-c", _RUN, "run", str(script), *words, "--", str(store.absolute())]


# As `python -m streamlit`, without Streamlit's banner, and ending on Ctrl-C without a traceback.
_RUN = """
import sys
from streamlit.web import bootstrap, cli
bootstrap._print_url = lambda *_: None
try:
    cli.main(prog_name="streamlit")
except KeyboardInterrupt:
    sys.exit(130)
"""


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The view's environment: not observed itself."""
    return dict(environ) | {"KVOBS_ENABLED": "off"}


def _check(store: Path) -> None:
    """Refuse what holds no store and is no directory for stores to come."""
    from kvobs.store import StoreError, StoreReader

    if not store.exists():
        raise Refused(f"There is nothing at {store}; name a store or a directory of stores.")
    if store.is_dir() and not any(store.glob("kvobs-*.sqlite")):
        return  # a process may be about to begin one
    try:
        StoreReader(store)
    except StoreError as error:
        raise Refused(str(error)) from None


def _port(wanted: int | None) -> int:
    """The port that was asked for, or the usual one, or a free one.

    Raises:
        Refused: the port that was asked for is taken.
    """
    for port in (PORT, 0) if wanted is None else (wanted,):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                if wanted is not None:
                    raise Refused(f"The port {wanted} cannot be used ({(error.strerror or str(error)).lower()}); "
                                  "name another, or 0 for a free one.") from None
                continue
            found: int = probe.getsockname()[1]
            return found
    raise Refused("There is no free port.")
