"""A time series database like that of 200 observed processes over hours, made by promtool: no process has to run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvobs.exporters._exposition import encode
from tests.dashboards.boards import Target, metrics_in
from tests.dashboards.harness import JOB
from tests.support import program
from tests.unit.test_exporter_exposition import TARGET, every_row, registry_of

BLOCK_S = 7200  # promtool makes blocks of two hours: a file for each is read least often
PATTERNS = 97
_SAMPLE = re.compile(r"^(\w+?)(?:\{(.*)\})? \S+$")


class Series(NamedTuple):
    """A series of one process: its name and labels as a scrape has them."""

    family: str
    name: str
    labels: str
    counts: bool


def page() -> tuple[dict[str, str], list[Series]]:
    """The kinds of families and the series of a process that tells every metric of the catalog."""
    kinds: dict[str, str] = {}
    found: list[Series] = []
    family = ""
    for line in encode(registry_of(every_row(), TARGET).collect(), openmetrics=True).decode().splitlines():
        if line.startswith("# TYPE"):
            family, kind = line.split()[2:4]
            kinds[family] = kind
        elif not line.startswith("#"):
            sample = _SAMPLE.match(line.partition(" # ")[0])
            assert sample, line
            found.append(Series(family, sample[1], sample[2] or "", kinds[family] in ("counter", "histogram")))
    return kinds, found


def chosen(series: Sequence[Series], board: Sequence[Target], count: int) -> list[Series]:
    """So many series: first what the board reads, once more for a second device, then others."""
    names = sorted({one.name for one in series})
    read = set[str]()
    for target in board:
        read |= metrics_in(target.expr, [re.sub(r"_(bucket|sum|count)$", "", name) for name in names])
    first = [one for one in series if re.sub(r"_(bucket|sum|count)$", "", one.name) in read]
    second = [one._replace(labels=re.sub(r'device="[^"]*"', 'device="cuda:1"', one.labels)) for one in first
              if 'device="' in one.labels]
    rest = [one for one in series if one not in first]
    found = list(dict.fromkeys([*first, *second, *rest]))[:count]
    assert len(found) == count
    order = {family: number for number, family in enumerate(dict.fromkeys(one.family for one in series))}
    return sorted(found, key=lambda one: order[one.family])


def make(directory: Path, series: Sequence[Series], kinds: dict[str, str], *, instances: int, begin: int, hours: int,
         every_s: int) -> int:
    """Blocks in ``directory``; how many samples they have. ``begin`` (Unix s) lies on a boundary of blocks."""
    assert begin % BLOCK_S == 0
    text, samples = directory.parent / "synthetic.txt", 0
    for start in range(begin, begin + hours * 3600, BLOCK_S):
        times = range(start, min(start + BLOCK_S, begin + hours * 3600), every_s)
        with text.open("w", encoding="ascii") as output:
            for part in _text(series, kinds, instances, begin, times):
                output.write(part)
        samples += len(times) * len(series) * instances
        subprocess.run([program("promtool", "prometheus"), "tsdb", "create-blocks-from", "openmetrics", str(text),
                        str(directory)], check=True, capture_output=True)
        text.unlink()
    return samples


def _text(series: Sequence[Series], kinds: dict[str, str], instances: int, begin: int,
          times: range) -> Iterator[str]:
    growing = [[f" {(time - begin) * (number + 1)} {time}\n" for time in times] for number in range(PATTERNS)]
    moving = [[f" {((time // 60 + number) * 7919) % 1000 / 1000} {time}\n" for time in times]
              for number in range(PATTERNS)]
    said = ""
    for number, one in enumerate(series):
        if one.family != said:
            said = one.family
            yield f"# TYPE {said} {kinds[said]}\n"
        for instance in range(instances):
            who = f'job="{JOB}",instance="10.0.{instance // 250}.{instance % 250}:9464"'
            prefix = f"{one.name}{{{one.labels}{',' if one.labels else ''}{who}}}"
            # Within a histogram the buckets come in order, and so their growth.
            pattern = growing[number % PATTERNS] if one.counts else moving[(number + instance) % PATTERNS]
            yield prefix + prefix.join(pattern)
    yield "# EOF\n"
