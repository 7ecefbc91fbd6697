"""``kvobs view`` as a process: how it ends, and that it leaves the store alone."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("streamlit", reason="streamlit is not installed: pip install 'kvobs[app]'")

from kvobs.store import StoreWriter
from tests.browser import ADDRESS, browsing, healthy, viewing
from tests.events import attention, turn
from tests.support import child_environment, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.peer]


def written(directory: Path) -> Path:
    writer = StoreWriter(directory, 2**24, "p")
    writer.write([attention(), turn()])
    writer.close()
    return directory


def contents(directory: Path) -> dict[str, str]:
    """All that the directory's stores say, and the names of all that is not SQLite's own."""
    found = {}
    for path in directory.iterdir():
        if path.suffix == ".sqlite":
            with sqlite3.connect(path) as connection:
                found[path.name] = "\n".join(connection.iterdump())
            connection.close()
        elif not path.name.endswith(("-wal", "-shm")):
            found[path.name] = "a stray file"
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_when_told_while_a_page_is_open(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end the view with code 0 and without a traceback, also while a browser looks at it."""
    server = subprocess.Popen([sys.executable, "-m", "kvobs", "view", written(tmp_path), "--port", "0"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment())
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        address = ADDRESS.search(line)
        assert address is not None, line
        wait_until(lambda: healthy(address[0]), 60, "the view's server")
        with browsing() as window:
            window.page.goto(address[0])
            wait_until(window.state, what="the page")
            server.send_signal(number)
            said, _ = server.communicate(timeout=60)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 0
    assert said.split() in ([], ["Stopping..."]), said


def test_the_store_is_as_it_was(tmp_path: Path) -> None:
    """All pages read; no row is changed and no file is added."""
    store = written(tmp_path)
    before = contents(store)
    with viewing(store, KVOBS_STORE=str(store)) as address, browsing() as window:
        window.page.goto(address)
        wait_until(window.state, what="the live page")
        window.open("Turns")
        wait_until(lambda: window.table(0), what="the turn")
        window.open("Attention")
        window.page.get_by_text("Sampled: one of").first.wait_for(timeout=30_000)
        assert window.errors == []
    assert contents(store) == before
