"""The generated parts of the documentation."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvobs import catalog, config, dashboards
from tests.support import ROOT


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "generate_docs", module)
    spec.loader.exec_module(module)
    return module


def test_the_readme_s_metric_table_is_the_catalog() -> None:
    """Between the markers of the README stands exactly the table that the catalog gives."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    between = text.split("<!-- metrics:begin -->\n")[1].split("<!-- metrics:end -->")[0]
    assert between == catalog.markdown()


def test_the_experiment_that_is_kept_says_what_the_readme_says(generator: ModuleType) -> None:
    """Counted anew from the runs that are kept: 20 of each arm, load and setting on the same seeds; act has no
    out-of-memory error, finishes what it admits and keeps every window, where the baseline fails in about half of them;
    without pressure it loses less than a twentieth; observing changes no answer. The README's table has these sums.
    """
    kept = json.loads((ROOT / "kvobs" / "lab" / "results" / "breaker_levels.json").read_text())["runs"]
    runs: dict[tuple[str, bool, str], list[dict[str, Any]]] = {}
    for run in kept:
        runs.setdefault((run["load"], run["expandable"], run["arm"]), []).append(run)
    assert {tuple(one["seed"] for one in found) for found in runs.values()} == {tuple(range(200, 220))}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for load, expandable in (("rising", False), ("rising", True), ("no pressure", False), ("no pressure", True)):
        base, act, observe = (runs[load, expandable, arm] for arm in ("baseline", "act", "observe"))
        assert sum(one["errors"] for one in act) == 0
        assert all(one["admitted"] == one["finished"] and not one["unfinished"] for one in act)
        assert all(not window["errors"] and window["slow"] <= 0.05 * window["allocations"]
                   for one in act for window in one["windows"])
        bad = [bool(window["errors"]) for one in base for window in one["windows"]]
        assert (0.4 < sum(bad) / len(bad) < 0.6) == (load == "rising")
        assert [one["answers"] for one in observe] == [one["answers"] for one in base]
        tokens = [sum(one["tokens"] for one in found) / sum(
            one["steps"] + one["allocation_s"] + one["action_s"] for one in found) for found in (act, base)]
        assert load == "rising" or tokens[0] >= 0.95 * tokens[1]
        for arm, found in (("baseline", base), ("act", act)):
            admitted, errors = (sum(one[name] for one in found) for name in ("admitted", "errors"))
            row, = (line.split(" | ") for line in text.splitlines() if line.startswith(
                f"| {load} | {'expandable' if expandable else 'plain'} | {arm} |"))
            assert (row[3], row[6]) == (f"{admitted:,}", f"{errors:,}")
    assert "\n" + generator.levels() in text


def test_check_and_write(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                         capsys: pytest.CaptureFixture[str]) -> None:
    """Check fails on an old table and changes nothing; write brings it up to date; then check passes."""
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    monkeypatch.setattr(dashboards, "generated", dict)
    page = tmp_path / "README.md"
    settings = f"<!-- settings:begin -->\n{config.markdown()}<!-- settings:end -->\n"
    settings += f"<!-- levels:begin -->\n{generator.levels()}<!-- levels:end -->\n"
    old = f"A\n<!-- metrics:begin -->\nold\n<!-- metrics:end -->\nB\n{settings}"
    page.write_text(old, encoding="utf-8")
    assert generator.main(["--check"]) == 1
    assert capsys.readouterr().err == "README.md: the part 'metrics' is not up to date; make docs writes it.\n"
    assert page.read_text(encoding="utf-8") == old
    assert generator.main(["--write"]) == 0
    assert page.read_text(encoding="utf-8") == (
        f"A\n<!-- metrics:begin -->\n{catalog.markdown()}<!-- metrics:end -->\nB\n{settings}")
    assert generator.main(["--check"]) == 0


@pytest.mark.parametrize("text", ["", "<!-- metrics:begin -->\n", "<!-- metrics:end -->\n<!-- metrics:begin -->\n",
                                  "<!-- metrics:begin -->\n<!-- metrics:begin -->\n<!-- metrics:end -->\n"])
def test_missing_markers_are_one_sentence(generator: ModuleType, text: str) -> None:
    """A page without proper markers is refused rather than damaged."""
    with pytest.raises(ValueError, match=r"^The markers .* in this order\.$"):
        generator.filled(text, "metrics", "new\n")


def test_the_committed_dashboards_are_the_generated_ones() -> None:
    """Every generated file lies under dashboards/ as the package makes it."""
    for name, text in dashboards.generated().items():
        assert (ROOT / "dashboards" / name).read_text(encoding="utf-8") == text, name


def test_stale_missing_and_left_over_dashboards_are_named(generator: ModuleType, tmp_path: Path,
                                                          capsys: pytest.CaptureFixture[str]) -> None:
    """Each is named with what is wrong and nothing is changed; write mends all; what lies elsewhere stays."""
    wanted = {"generated/a.json": "a\n", "grafana.com/b.json": "b\n", "METRICS.md": "m\n", "rules/c.yaml": "c\n"}
    for name, text in {"generated/a.json": "old", "generated/z.json": "z", "METRICS.md": "m\n", "rules/c.yaml": "c\r\n",
                       "runbooks/by-hand.md": "kept", "preview/p.png": "kept"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert generator.whole_files(tmp_path, wanted, write=False) == 1
    assert capsys.readouterr().err.splitlines() == [
        "dashboards/generated/a.json: not up to date; make docs writes it.",
        "dashboards/grafana.com/b.json: missing; make docs writes it.",
        "dashboards/rules/c.yaml: not up to date; make docs writes it.",
        "dashboards/generated/z.json: left over, nothing generates it; make docs removes it."]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert generator.whole_files(tmp_path, wanted, write=True) == 0
    assert {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == {
        **wanted, "runbooks/by-hand.md": "kept", "preview/p.png": "kept"}
    assert generator.whole_files(tmp_path, wanted, write=False) == 0
