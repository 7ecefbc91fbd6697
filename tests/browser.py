"""A real browser and the real ``kvobs view`` for tests."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import child_environment, program, wait_until

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")


@contextlib.contextmanager
def viewing(store: Path, *options: str, cwd: Path | None = None, **settings: str) -> Iterator[str]:
    """``kvobs view`` over a store, as a process of its own on a free port; its address."""
    pytest.importorskip("streamlit")
    server = subprocess.Popen(
        [sys.executable, "-m", "kvobs", "view", str(store), "--port", "0", *options], cwd=cwd,
        env=child_environment(**settings), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        ready, _, _ = select.select([server.stdout], [], [], 60)
        line = server.stdout.readline() if ready else ""
        found = ADDRESS.search(line)
        assert found is not None, line
        wait_until(lambda: healthy(found[0]) or server.poll() is not None, 60, "the view's server")
        assert server.poll() is None, server.stdout.read()
        yield found[0]
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def healthy(address: str) -> bool:
    import urllib.request

    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/_stcore/health", timeout=2) as answer:
        return bool(answer.read() == b"ok")
    return False


class Window:
    """One browser window, and what went wrong in it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.errors: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def figure(self, key: str) -> str:
        """The very number below a figure, as the page says it; empty while there is none."""
        found = self.page.locator(f".st-key-figure-{key} [data-testid=stCaptionContainer]")
        return str(found.first.inner_text()).partition(" · ")[0] if found.count() else ""

    def state(self) -> str:
        """The banner that says how old everything is."""
        found = self.page.locator(".st-key-state")
        return str(found.first.inner_text()) if found.count() else ""

    def table(self, number: int) -> list[dict[str, str]]:
        """A table of the page as dicts of texts; empty while it is not there."""
        found = self.page.locator("[data-testid=stTable] table")
        if found.count() <= number:
            return []
        rows = found.nth(number).evaluate("t => [...t.rows].map(r => [...r.cells].map(c => c.innerText.trim()))")
        return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]

    def open(self, name: str) -> None:
        """Go to a page by the navigation."""
        self.page.locator("[data-testid=stSidebarNavLink]", has_text=name).click()
        self.page.get_by_role("heading", name=name, exact=True).wait_for(timeout=30_000)


@contextlib.contextmanager
def browsing(*, dark: bool = False, width: int = 1400, height: int = 1000) -> Iterator[Window]:
    """Debian's Chromium with one window; nothing is downloaded, nothing is kept."""
    playwright = pytest.importorskip("playwright.sync_api",
                                     reason="playwright is not installed: pip install 'kvobs[dev]'")
    chromium = program("chromium", "chromium")
    os.environ.setdefault("PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD", "1")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=[
            "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--no-first-run", "--disable-dev-shm-usage"])
        try:
            context = browser.new_context(viewport={"width": width, "height": height},
                                          color_scheme="dark" if dark else "light")
            yield Window(context.new_page())
        finally:
            browser.close()
