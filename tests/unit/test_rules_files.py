"""The files for Prometheus and Alertmanager: what is committed, what YAML makes of them, what the real programs say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvobs.config import ARTICLE
from kvobs.dashboards.rules import DASHBOARDS, NAMES, RUNBOOKS, alert_groups, files, recording_groups
from kvobs.dashboards.rules._yaml import document
from tests.support import ROOT, program

MADE = files((ARTICLE,), "https://runbooks.example/kvobs", "https://grafana.example")
RULES = ("rules/kvobs-recording.yaml", "rules/kvobs-alerts.yaml")
NASTY: dict[str, Any] = {
    "texts": ["", " ", "yes", "1", "a: b", "# no", "- x", "é ✓ 😀", 'q"u\'o\\te', "tab\t", "two\nlines", "ends\n",
              " leading\nspace", "trailing \nspace", "{{ $labels.x }}", "\x7f", "a\r\nb", "null\nx: y\n  z"],
    "numbers": [0, -1, 1.5, True, None], "empty": [], "none": {},
    "deep": [[1, [2]], [{"a": [{"b": "c"}], "d": {"e": "f"}}]],
    "a b": {"1": "x", "k-e.y": "y"},
}


def yaml(text: str) -> Any:
    return pytest.importorskip("yaml").safe_load(text)


def said(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def written(tmp_path: Path) -> Path:
    for path, text in MADE.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("path", MADE)
def test_what_is_committed_is_what_is_made(path: str) -> None:
    """The committed files are those of the article's objective with links that are true anywhere."""
    text = files((ARTICLE,), RUNBOOKS, DASHBOARDS)[path]
    assert (ROOT / "dashboards" / path).read_text(encoding="utf-8") == text


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """dashboards/runbooks holds a page per alert and no page of an alert that is gone; links lead to them."""
    pages = {path.stem for path in (ROOT / "dashboards" / "runbooks").glob("Kvobs*.md")}
    assert pages == set(NAMES)
    links = re.findall(r'runbook_url: "(.*)"', files((ARTICLE,), RUNBOOKS, DASHBOARDS)["rules/kvobs-alerts.yaml"])
    assert links
    assert all((ROOT / "dashboards" / link).is_file() for link in links)


def test_yaml_says_what_was_meant() -> None:
    """A YAML reader finds the same groups, and the resource holds recording rules and alerts, in this order."""
    recording, alerts = (yaml(MADE[path])["groups"] for path in RULES)
    assert recording == recording_groups((ARTICLE,))
    assert alerts == alert_groups((ARTICLE,), "https://runbooks.example/kvobs", "https://grafana.example")
    resource = yaml(MADE["rules/kvobs-prometheusrule.yaml"])
    assert resource.pop("spec") == {"groups": recording + alerts}
    assert resource == {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
                        "metadata": {"name": "kvobs", "labels": {"app.kubernetes.io/name": "kvobs"}}}


def test_any_text_survives_yaml() -> None:
    """Texts that look like something else, of several lines or with odd spaces, are read back as they were."""
    assert yaml(document(NASTY, ["a comment"])) == NASTY


def test_links_are_below_their_bases() -> None:
    """A base with or without a slash at its end gives the same links."""
    slashed = files((ARTICLE,), "https://runbooks.example/kvobs/", "https://grafana.example/")
    assert slashed == MADE
    assert 'runbook_url: "https://runbooks.example/kvobs/KvobsOutOfMemory.md"' in MADE["rules/kvobs-alerts.yaml"]
    assert 'dashboard_url: "https://grafana.example/d/kvobs-allocator"' in MADE["rules/kvobs-alerts.yaml"]


@pytest.mark.peer
def test_promtool_takes_the_rules(written: Path) -> None:
    """promtool finds every rule, in the plain files and in the groups of the resource, and complains about none."""
    promtool = program("promtool", "prometheus")
    number = sum(len(group["rules"]) for group in (*recording_groups((ARTICLE,)), *alert_groups((ARTICLE,), "", "")))
    groups = [*recording_groups((ARTICLE,)), *alert_groups((ARTICLE,), "", "")]
    (written / "all.yaml").write_text(json.dumps({"groups": groups}))
    for paths in (RULES, ("all.yaml",)):
        told = said([promtool, "check", "rules", *paths], written)
        assert sum(map(int, re.findall(r"SUCCESS: (\d+) rules found", told))) == number
        assert "duplicate" not in told


@pytest.mark.peer
def test_amtool_takes_the_routes(written: Path) -> None:
    """amtool accepts the configuration and routes each severity to its receiver, and what has none to the tickets'."""
    amtool, config = program("amtool", "prometheus-alertmanager"), "alertmanager/alertmanager.yaml"
    assert "3 receivers" in said([amtool, "check-config", config], written)
    for severity, receiver in (("page", "kvobs-page"), ("ticket", "kvobs-ticket"), ("info", "kvobs-info"),
                               ("other", "kvobs-ticket")):
        route = [amtool, "config", "routes", "test", f"--config.file={config}", f"severity={severity}",
                 "alertname=KvobsOutOfMemory"]
        assert said(route, written).strip() == receiver
