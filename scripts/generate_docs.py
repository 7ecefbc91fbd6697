"""Write or check the generated parts of the documentation: ``--write`` or ``--check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path

import msgspec

from kvobs import catalog, config, dashboards
from kvobs.lab.breaker._results import Results
from kvobs.lab.breaker._table import table

ROOT = Path(__file__).resolve().parent.parent


def levels() -> str:
    """The table of the experiment on the virtual GPU, from the results that are kept."""
    kept = resources.files("kvobs.lab") / "results" / "breaker_levels.json"
    return table(msgspec.json.decode(kept.read_bytes(), type=Results)) + "\n"


# File, name of the markers, what stands between them.
PARTS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "settings", config.markdown),
    ("README.md", "metrics", catalog.markdown),
    ("README.md", "levels", levels),
)

# Everything in these folders is generated: a file too many is as stale as one too few.
FOLDERS = ("generated", "grafana.com", "rules", "alertmanager")


def filled(text: str, name: str, content: str) -> str:
    """The text with ``content`` between its ``<!-- name:begin -->`` and ``<!-- name:end -->`` lines.

    Raises:
        ValueError: a marker is missing, doubled or out of order; one sentence.
    """
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"The markers {begin.strip()} and {end} must each stand once on a line, in this order.")
    head, rest = text.split(begin)
    return head + begin + content + end + rest.split(end)[1]


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 when a generated part is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true", help="bring the files up to date")
    what.add_argument("--check", action="store_true", help="say which files are not up to date")
    options = parser.parse_args(arguments)
    stale = 0
    for file, name, content in PARTS:
        path = ROOT / file
        before = path.read_text(encoding="utf-8")
        try:
            after = filled(before, name, content())
        except ValueError as error:
            print(f"{file}: {error}", file=sys.stderr)
            return 1
        if before != after and options.write:
            path.write_text(after, encoding="utf-8")
            print(f"{file}: wrote the part {name!r}.")
        elif before != after:
            print(f"{file}: the part {name!r} is not up to date; make docs writes it.", file=sys.stderr)
            stale = 1
    return max(stale, whole_files(ROOT / "dashboards", dashboards.generated(), write=options.write))


def whole_files(folder: Path, wanted: Mapping[str, str], *, write: bool) -> int:
    """Write or check files that are generated whole; returns 1 when one is missing, stale or left over."""
    found = {str(path.relative_to(folder)): path for name in FOLDERS
             for path in sorted((folder / name).rglob("*")) if path.is_file()}
    stale = 0
    for name, content in wanted.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == content.encode():
            continue
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode())
            print(f"dashboards/{name}: written.")
        else:
            print(f"dashboards/{name}: {'not up to date' if path.exists() else 'missing'}; make docs writes it.",
                  file=sys.stderr)
            stale = 1
    for name in sorted(found.keys() - wanted.keys()):
        if write:
            found[name].unlink()
            print(f"dashboards/{name}: removed, nothing generates it.")
        else:
            print(f"dashboards/{name}: left over, nothing generates it; make docs removes it.", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
