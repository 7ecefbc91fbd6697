"""Draws boards in headless Chromium with the page that ``scripts/preview`` builds; nothing is fetched while drawing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import mimetypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.browser import Window, browsing

PROJECT = Path(__file__).resolve().parent / "preview"
SMALL_BYTES = 245_000
OLDEST_NODE = 20
ADDRESS = "http://preview.invalid/"
LOCKED = ("package.json", "package-lock.json", ".npmrc")
# What is written onto a canvas is no text of the page: remembered here, per panel, as it is drawn.
LISTENING = """
(() => {
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    (this.canvas.written ??= new Set()).add(String(text));
    return write.call(this, text, ...rest);
  };
})();
"""
READING = """
() => [...document.querySelectorAll('[data-panel]')].map((panel) => ({
  id: Number(panel.dataset.panel), type: panel.dataset.type, title: panel.dataset.title,
  empty: panel.dataset.empty === 'true', frames: Number(panel.dataset.frames),
  error: panel.dataset.error ?? panel.querySelector('[data-failed]')?.dataset.failed ?? null,
  cut: [...panel.querySelectorAll('h2')].some((title) => {
    const range = document.createRange();
    range.selectNodeContents(title);
    return range.getBoundingClientRect().width > title.getBoundingClientRect().width + 0.5;
  }),
  own: Boolean(panel.querySelector('[data-own]')),
  message: panel.querySelector('[data-message]')?.innerText ?? null,
  values: [...panel.querySelectorAll('[data-value]')].map((one) => one.dataset.value),
  legend: [...panel.querySelectorAll('[data-testid^="data-testid VizLegend series"]')]
    .map((one) => one.innerText.trim()),
  cells: [...panel.querySelectorAll('[role=row]')].map((row) =>
    [...row.querySelectorAll('[role=cell], [role=columnheader]')].map((cell) => cell.innerText.trim())),
  text: panel.innerText,
  exemplars: Number(panel.querySelector('[data-exemplars]')?.dataset.exemplars ?? 0),
  written: [...panel.querySelectorAll('canvas')].flatMap((canvas) => [...(canvas.written ?? [])]),
}))
"""


class CannotBuildError(Exception):
    """What is missing here for building the page, as one sentence."""


class BuildError(Exception):
    """The page's own sources do not build."""


@dataclass(frozen=True)
class Picture:
    """A board as drawn: the PNG, what each panel shows as text, the page's own text, and what went wrong."""

    png: bytes
    panels: list[dict[str, Any]]
    text: str
    problems: list[str]


def hash_of(files: list[Path]) -> str:
    """A short name for the contents of files."""
    whole = hashlib.sha256()
    for file in files:
        whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def run(command: list[str], folder: Path, what: str, seconds: float, error: type[Exception]) -> None:
    """Run a command of node. Raises ``error`` with what it said first where it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
                              stdin=subprocess.DEVNULL, env=os.environ | {"CI": "true", "NO_COLOR": "1"})
    except subprocess.TimeoutExpired:
        raise error(f"{what} took more than {seconds:.0f} s.") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise error(f"{what} failed: {' | '.join(said)[:600]}")


def why_not() -> str:
    """What is missing for building: node (20 or newer) or npm; empty where both are there."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        return f"Not installed: {', '.join(missing)}."
    told = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return "" if int(told.lstrip("v").split(".")[0]) >= OLDEST_NODE else f"node {told} is older than {OLDEST_NODE}."


def built() -> Path:
    """The page's folder, built where it is not yet.

    Packages lie in the user's cache in a folder named after the lock file, the page beside them in one named after
    its sources. Raises CannotBuildError without node and npm, or where npm cannot fetch the packages, and BuildError
    where the sources are wrong.
    """
    if reason := why_not():
        raise CannotBuildError(reason)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvobs" / "preview"
    home = cache / hash_of([PROJECT / name for name in LOCKED])
    sources = sorted(path for path in PROJECT.rglob("*")
                     if path.is_file() and not {"node_modules", "dist"} & set(path.parts))
    name = hash_of(sources)
    page = home / f"page-{name}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "node_modules" / ".package-lock.json").is_file():
            for locked in LOCKED:
                shutil.copy(PROJECT / locked, home / locked)
            run(["npm", "ci"], home, "npm ci", 600, CannotBuildError)
        if not page.is_dir():
            work = home / f"work-{name}"
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(PROJECT, work, ignore=shutil.ignore_patterns("node_modules", "dist"))
            vite = str(home / "node_modules" / "vite" / "bin" / "vite.js")
            run(["node", vite, "build"], work, "vite build", 300, BuildError)
            (work / "dist").rename(page)
            shutil.rmtree(work)
    return page


class Studio:
    """A browser window with the page; draws one board after the other."""

    def __init__(self, page: Path, window: Window) -> None:
        self._page, self._window = page, window
        self._drawing = b"{}"
        window.page.add_init_script(LISTENING)
        window.page.route("**/*", self._answer)

    def _answer(self, route: Any) -> None:
        path = route.request.url.removeprefix(ADDRESS).partition("?")[0] or "index.html"
        file = self._page / path
        if path == "drawing.json":
            route.fulfill(body=self._drawing, content_type="application/json")
        elif route.request.url.startswith(ADDRESS) and file.is_file():
            route.fulfill(path=file, content_type=mimetypes.guess_type(file.name)[0] or "application/octet-stream")
        elif path == "favicon.ico":
            route.fulfill(status=204)
        else:
            self._window.errors.append(f"The page asked for {route.request.url}, which is not there.")
            route.abort()

    def draw(self, drawing: Mapping[str, Any]) -> Picture:
        """Draw one board. Raises RuntimeError where the page itself fails."""
        self._drawing = json.dumps(drawing).encode()
        self._window.errors.clear()
        page = self._window.page
        page.set_viewport_size({"width": drawing["width"], "height": 900})
        page.goto(ADDRESS)
        page.wait_for_selector("body[data-drawn], body[data-failed]", state="attached", timeout=60_000)
        failed = page.evaluate("document.body.dataset.failed")
        if failed:
            raise RuntimeError(failed)
        page.wait_for_load_state("networkidle")
        height = page.evaluate("document.querySelector('main').scrollHeight")
        page.set_viewport_size({"width": drawing["width"], "height": height})
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return Picture(small(page.screenshot()), page.evaluate(READING), page.evaluate("document.body.innerText"),
                       list(self._window.errors))


def small(png: bytes) -> bytes:
    """The picture with a palette, of fewer colours the larger it is, where Pillow is there and that is smaller."""
    try:
        from PIL import Image
    except ImportError:
        return png
    with Image.open(io.BytesIO(png)) as image:
        for colors in (256, 128, 64):
            packed = io.BytesIO()
            # An octree keeps what is rare: a line of a chart has few pixels beside the letters around it.
            found = image.convert("RGB").quantize(colors, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            found.save(packed, "PNG", optimize=True)
            png = min(png, packed.getvalue(), key=len)
            if len(png) <= SMALL_BYTES:
                break
    return png


@contextlib.contextmanager
def studio(page: Path) -> Iterator[Studio]:
    """Chromium with the built page."""
    with browsing() as window:
        yield Studio(page, window)
