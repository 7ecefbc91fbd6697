"""Runbooks: a decision table each, whose boards, panels, pages, queries, settings and commands all exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvobs.cli._app import app
from kvobs.config import ARTICLE
from kvobs.dashboards.rules import NAMES, alert_groups, recording_groups
from tests.rules_promql import exported, unknown
from tests.support import ROOT, program

FOLDER = ROOT / "dashboards" / "runbooks"
PAGES = sorted(FOLDER.glob("*.md"))
ALERTS = sorted(FOLDER.glob("Kvobs*.md"))
HEADINGS = ["What it means", "Decide", "When it is false", "How it resolves"]
_PANEL = re.compile(r"\*\*([^*:]+): ([^*]+)\*\*")


def stem(path: Path) -> str:
    return path.stem


def queries(path: Path) -> list[str]:
    return re.findall(r"^```promql\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def panels() -> set[tuple[str, str]]:
    """Board and panel titles of the generated boards."""
    found = set()
    for path in (ROOT / "dashboards" / "generated").glob("*.json"):
        board = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            found |= {(board["title"].removeprefix("kvobs / "), one.get("title", ""))
                      for one in (panel, *panel.get("panels", ()))}
    return found


@pytest.mark.parametrize("path", ALERTS, ids=stem)
def test_a_page_says_what_it_must(path: Path) -> None:
    """Title, severity, four headings, and a table of at least two ways to decide with three cells each."""
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {path.stem}\n\nSeverity: ")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[:2] == ["| what you see | cause | what to do |", "|---|---|---|"]
    assert len(rows) >= 4
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)


def test_severities_are_the_rules() -> None:
    """The page says the severity that the rule has."""
    for group in alert_groups((ARTICLE,), "r", "d"):
        for rule in group["rules"]:
            said = (FOLDER / f"{rule['alert']}.md").read_text(encoding="utf-8").splitlines()[2]
            assert rule["labels"]["severity"] in said, rule["alert"]


@pytest.mark.parametrize("path", PAGES, ids=stem)
def test_what_is_pointed_at_exists(path: Path) -> None:
    """Links lead to pages beside this one, and every board and panel that is named is among the generated ones."""
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (FOLDER / link).is_file(), link
    there = panels()
    if not there:
        pytest.skip("dashboards/generated holds no boards.")
    assert not set(_PANEL.findall(text)) - there


@pytest.mark.parametrize("path", PAGES, ids=stem)
def test_commands_and_settings_exist(path: Path) -> None:
    """Every `kvobs ...` command and `KVOBS_...` setting is one, with the options that stand beside it."""
    text, settings = path.read_text(encoding="utf-8"), (ROOT / "README.md").read_text(encoding="utf-8")
    for setting in re.findall(r"`(KVOBS_[A-Z_]+)", text):
        assert f"`{setting}`" in settings, setting
    for words in re.findall(r"`kvobs ([^`]+)`", text):
        command: Any = get_command(app)
        for word in words.split():
            assert word in getattr(command, "commands", {}), words
            command = command.commands[word]
    top: Any = get_command(app)
    options = {option for one in top.commands.values() for parameter in one.params for option in parameter.opts}
    assert set(re.findall(r"`(--[a-z-]+)`", text)) <= options


@pytest.mark.parametrize("path", PAGES, ids=stem)
def test_queries_name_what_exists(path: Path) -> None:
    """The queries of a page name metrics and labels of the catalog, or recorded ones; an alert's page has one."""
    recorded = {rule["record"]: frozenset({"job", "instance"}) for group in recording_groups((ARTICLE,))
                for rule in group["rules"]}
    assert queries(path) or path not in ALERTS
    assert [one for query in queries(path) for one in unknown(query, exported() | recorded)] == []


@pytest.mark.peer
def test_promtool_reads_the_queries(tmp_path: Path) -> None:
    """Every query of every page is PromQL by promtool."""
    rules = [{"record": f"r:{index}", "expr": query}
             for index, query in enumerate(query for path in PAGES for query in queries(path))]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": [{"name": "pages", "rules": rules}]}))
    done = subprocess.run([program("promtool", "prometheus"), "check", "rules", "rules.json"], cwd=tmp_path, text=True,
                          capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(rules) >= len(NAMES)
