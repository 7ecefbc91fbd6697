"""Every name and label in every rule is one that the catalog gives, or that a rule before it recorded."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvobs.config import ARTICLE, Objective
from kvobs.dashboards.rules import ALERTS, alert_groups, recording_groups
from kvobs.dashboards.rules._promql import grown, metric
from tests.rules_promql import Selector, exported, read, unknown

OBJECTIVES = (ARTICLE, Objective(name="whole", signal="out_of_memory", target=0.9999))


def rules() -> list[dict[str, Any]]:
    return [rule for group in (*recording_groups(OBJECTIVES), *alert_groups(OBJECTIVES, "r", "d"))
            for rule in group["rules"]]


def labels_of(rule: dict[str, Any], series: dict[str, frozenset[str]]) -> frozenset[str]:
    """The labels that a rule's result has: those that its sums keep, or else those of what it names."""
    seen = read(rule["expr"])
    kept = seen.grouping or frozenset[str]().union(*(series[selector.name] for selector in seen.selectors))
    return (kept - {"le"}) | rule.get("labels", {}).keys()


def complaints(found: list[dict[str, Any]]) -> list[str]:
    series, said = exported(), list[str]()
    for rule in found:
        name = rule.get("alert") or rule["record"]
        said += [f"{name}: {one}" for one in unknown(rule["expr"], series)]
        if "record" in rule and name not in series:
            series[name] = labels_of(rule, series) if not said else frozenset()
        texts = " ".join(rule.get("annotations", {}).values())
        if "alert" in rule and not said:
            told = labels_of(rule, series) | {"job", "instance"}
            said += [f"{name}: $labels.{label}" for label in set(re.findall(r"\$labels\.(\w+)", texts)) - told]
    return said


def test_all_names_are_known() -> None:
    """No rule names a metric, a matcher, a grouping or an annotation's label that nothing has."""
    assert complaints(rules()) == []


@pytest.mark.parametrize(("before", "after", "complaint"), [
    ("kvobs_kv_preemptions_total", "kvobs_kv_preempted_total",
     "kvobs:kv_preemptions:increase5m: kvobs_kv_preempted_total"),
    ('state="unused"', 'status="unused"', "kvobs:device_headroom:ratio: kvobs_allocator_usage_bytes.status"),
    ("by (job, instance, stage)", "by (job, instance, phase)", "KvobsTelemetryDropped: by phase"),
    ("kvobs:kv_pool_headroom:band15m <= 0", "kvobs:kv_pool_headroom:band <= 0",
     "KvobsKvPoolExhaustionForecast: kvobs:kv_pool_headroom:band"),
    ("$labels.stage", "$labels.queue", "KvobsTelemetryDropped: $labels.queue"),
])
def test_a_planted_rename_is_found(before: str, after: str, complaint: str) -> None:
    """Whatever is renamed in a rule alone, the rule is named with what nobody has any more."""
    planted, hits = list[dict[str, Any]](), 0
    for rule in rules():
        texts = {key: value.replace(before, after) for key, value in rule.get("annotations", {}).items()}
        changed = rule | {"expr": rule["expr"].replace(before, after)} | ({"annotations": texts} if texts else {})
        hits += changed != rule
        planted.append(changed)
    assert hits
    assert complaint in complaints(planted)


def test_what_is_renamed_in_the_catalog_stops_the_rules() -> None:
    """Rules take names from the catalog, so that a name that is gone, or a label, is refused where it is asked for."""
    with pytest.raises(ValueError, match=r"^The catalog has no metric 'kvobs\.kv\.preempted'\.$"):
        metric("kvobs.kv.preempted")
    refusal = r"^kvobs\.out_of_memory has no label 'device'; it has instance, job, model\.$"
    with pytest.raises(ValueError, match=refusal):
        metric("kvobs.out_of_memory", device="cuda:0")


def test_selectors() -> None:
    """A matcher's own operator stands before its value."""
    assert metric("kvobs.kv.blocks", state="~cached|free", model="!x", cache="!~y", device="d") == (
        'kvobs_kv_blocks{state=~"cached|free", model!="x", cache!~"y", device="d"}')
    assert metric("kvobs.alloc.latency", "_bucket") == "kvobs_alloc_latency_seconds_bucket"


def test_the_scanner_reads_what_is_there() -> None:
    """Names, matchers and groupings are told apart from functions, operators, numbers and texts."""
    seen = read('sum by (job, a) (increase(x_total{b="by (c)", d!~"e"}[5m] offset 1h))'
                " / on (job) group_left (f) y:z > 1e-6")
    assert seen.selectors == (Selector("x_total", frozenset({"b", "d"})), Selector("y:z", frozenset()))
    assert seen.grouping == {"job", "a", "f"}
    assert [one.name for one in read(grown("x_total", 300)).selectors].count("x_total") == 4
    with pytest.raises(ValueError, match="is no PromQL"):
        read("x @ 5 $y")


def test_every_alert_says_what_it_must() -> None:
    """Unique CamelCase names that begin with Kvobs; summary and description are sentences with labels."""
    names = [alert.name for alert in ALERTS]
    assert len(set(names)) == len(names)
    for rule in rules():
        if "alert" not in rule:
            continue
        said = rule["annotations"]
        assert re.fullmatch(r"Kvobs([A-Z][a-z]+)+", rule["alert"])
        assert rule["labels"]["severity"] in ("page", "ticket", "info")
        assert said["summary"].endswith(".")
        assert said["description"].endswith(".")
        assert "$labels." in said["summary"] + said["description"]
        assert said["runbook_url"] == f"r/{rule['alert']}.md"
        assert re.fullmatch(r"d/d/kvobs-[a-z-]+", said["dashboard_url"])
