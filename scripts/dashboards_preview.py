"""Write dashboards/preview/*.png: the generated boards, drawn from what a Prometheus saw of scripted incidents."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.dashboards_draw import BuildError, CannotBuildError, built, studio
from scripts.dashboards_query import Prometheus, View, drawing
from tests.peers import http_get, listening, running
from tests.support import free_port, program, wait_until

ROOT = Path(__file__).resolve().parent.parent
# The scenario in which each board has most to tell, of several the first that was played; none: all processes at once.
BOARDS = {
    "overview": "fragmentation", "kv-cache": "vllm preemption", "allocator": "fragmentation", "migration": "migration",
    "requests": "vllm preemption", "slo-breaker": "pressure", "fleet": None, "telemetry": "telemetry",
}
# Where Overview has something to tell; the other scenarios are there for single panels.
OVERVIEWS = ("calm", "capacity", "migration", "preemption", "latency", "telemetry", "unreachable", "pressure")
LARGEST_BYTES, LARGEST_SUM_BYTES = 250_000, 3_000_000


@dataclass(frozen=True)
class Scenario:
    """What was played, and when (unix seconds): ``end`` is the end of the incident itself."""

    name: str
    begin: float
    end: float
    instances: tuple[str, ...]
    happens: str


@dataclass(frozen=True)
class Wanted:
    """One picture: a board under a scenario, or under all of them."""

    file: str
    board: str
    scenario: Scenario | None


def scenarios(folder: Path) -> tuple[list[Scenario], float]:
    """The scenarios of a folder that ``tests.dashboards.incidents`` wrote, and the seconds between scrapes."""
    told = json.loads((folder / "incidents.json").read_text(encoding="utf-8"))
    return [Scenario(one["name"], one["begin"], one["incident_end"], tuple(one["instances"]), one["happens"])
            for one in told["scenarios"]], float(told["scrape_interval_s"])


def wanted(played: list[Scenario]) -> list[Wanted]:
    """One picture per board, and one of Overview per scenario."""
    by_name = {one.name: one for one in played}
    boards = [Wanted(f"{board}.png", board, next(by_name[name] for name in names.split() if name in by_name)
                     if names else None) for board, names in BOARDS.items()]
    return boards + [Wanted(f"overview-{name}.png", "overview", by_name[name]) for name in OVERVIEWS]


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Prometheus]:
    """A Prometheus over data that are there already; it scrapes nothing."""
    path, port = program("prometheus", "prometheus"), free_port()
    config = folder / "reading.yml"
    config.write_text("storage:\n  exemplars:\n    max_exemplars: 10000\n")
    command = [path, f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", "--log.level=warn",
               f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage",
               "--storage.tsdb.retention.time=10y"]
    with running(command, folder / "reading.txt"):
        server = Prometheus(f"http://127.0.0.1:{port}")
        wait_until(lambda: listening(port) and http_get(f"{server.url}/-/ready")[0] == 200, 60, "Prometheus is ready")
        yield server


def view_of(picture: Wanted, played: list[Scenario], scrape_s: float) -> View:
    """From the beginning of a scenario to the end of its incident, with its processes; else all that were at once."""
    if picture.scenario is None:
        return View(played[0].begin, played[0].end, scrape_s=scrape_s)
    return View(picture.scenario.begin, picture.scenario.end, {"instance": picture.scenario.instances},
                scrape_s=scrape_s)


def write(folder: Path, boards: Path, out: Path, theme: str, only: str) -> int:
    """Draw everything from a folder of incidents; the number of pictures with a problem, each told on stderr."""
    played, scrape_s = scenarios(folder)
    page, bad, size = built(), 0, 0
    out.mkdir(parents=True, exist_ok=True)
    with reading(folder) as server, studio(page) as artist:
        for picture in wanted(played):
            if only not in picture.file:
                continue
            board = json.loads((boards / f"kvobs-{picture.board}.json").read_text(encoding="utf-8"))
            caption = picture.scenario.name if picture.scenario else "all scenarios"
            drawn = artist.draw(drawing(board, view_of(picture, played, scrape_s), server, theme=theme,
                                        caption=caption))
            problems = drawn.problems + [f"{one['title']}: {one['error']}" for one in drawn.panels if one["error"]]
            if len(drawn.png) > LARGEST_BYTES:
                problems.append(f"{len(drawn.png):,} bytes; {LARGEST_BYTES:,} are allowed.")
            problems += [f"{one['title']}: its title is cut." for one in drawn.panels if one["cut"]]
            for problem in problems:
                print(f"{picture.file}: {problem}", file=sys.stderr)
            bad, size = bad + bool(problems), size + len(drawn.png)
            (out / picture.file).write_bytes(drawn.png)
            empty = sum(one["empty"] for one in drawn.panels if one["type"] != "text")
            print(f"{out / picture.file}: {len(drawn.panels)} panels, {empty} without data, {len(drawn.png):,} bytes")
    if size > LARGEST_SUM_BYTES:
        print(f"All together {size:,} bytes; {LARGEST_SUM_BYTES:,} are allowed.", file=sys.stderr)
        bad += 1
    return bad


def main() -> int:
    """Play the incidents unless a folder of them is given, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--incidents", type=Path, metavar="DIR", help="what tests.dashboards.incidents left there")
    parser.add_argument("--boards", type=Path, default=ROOT / "dashboards" / "generated", metavar="DIR")
    parser.add_argument("--out", type=Path, default=ROOT / "dashboards" / "preview", metavar="DIR")
    parser.add_argument("--theme", choices=("dark", "light"), default="dark")
    parser.add_argument("--only", default="", metavar="TEXT", help="pictures with this in their name")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        try:
            built()
            folder = asked.incidents or Path(scratch) / "incidents"
            if asked.incidents is None:
                subprocess.run([sys.executable, "-m", "tests.dashboards.incidents", "--out", str(folder)], check=True,
                               cwd=ROOT, stdout=subprocess.DEVNULL)
            bad = write(folder, asked.boards, asked.out, asked.theme, asked.only)
        except (BuildError, CannotBuildError, FileNotFoundError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            return 2
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
