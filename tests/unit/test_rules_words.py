"""What a person reads: annotations as promtool renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.rules_cases import CASES, alive
from tests.rules_promtool import WHO, promtool, scene

pytestmark = pytest.mark.peer
POOL = "of m on cuda:0 (a:1)"
WORDS = {
    "KvobsKvPoolExhaustionForecast": (
        f"The KV pool {POOL} will be used up within 15 minutes.",
        "39.96% of the blocks are free or reusable. The line through the last 15 minutes reaches 0 within 15 minutes "
        "even at the upper edge of its band, and so does the trend of the last 5 minutes.", "kv-cache"),
    "KvobsOutOfMemory": (
        "Calls of m (a:1) ended in an out-of-memory error.", "1 within the last 10 minutes.", "allocator"),
    "KvobsUnexplainedMemory": (
        "Memory of cuda:0 (a:1) is held by nobody that kvobs knows.",
        "6% of the device is neither this process's, nor another's, nor free.", "allocator"),
    "KvobsErrorBudgetExhausted": (
        "The error budget of o is spent (kvobs, a:1).",
        "-50% of it is left, of the events of the last 3 days or since the process began.", "slo-breaker"),
    "KvobsBreakerFlapping": (
        "Level 1 of the breaker of cuda:0 (a:1) opens again and again.",
        "It opened 6 times within 30 minutes (mode act).", "slo-breaker"),
    "KvobsBreakerActionsRefused": (
        "The breaker's orders are refused: empty_cache by transformers (a:1).",
        "3 orders were refused within 15 minutes, more than were done.", "slo-breaker"),
    "KvobsLabelOverflow": (
        "kvobs.kv.usage of a:1 (kvobs) has more series than are kept.",
        "3 points went to the series named other within 15 minutes.", "telemetry"),
    "KvobsEngineUnreachable": (
        "The engine at e:1 does not answer a:1 (kvobs).",
        "The bridge's scrapes have failed for 5 minutes; the engine's own values are absent.", "telemetry"),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_person_reads(name: str, tmp_path: Path) -> None:
    """Labels stand in their places, values are rounded for people, and the links lead to the page and the board."""
    case = next(case for case in CASES if case.alert == name)
    summary, description, board = WORDS[name]
    told = scene(name, alive() | case.firing, [])
    last = told["promql_expr_test"][0]["eval_time"]
    expected: dict[str, Any] = {
        "exp_labels": {"severity": case.severity} | WHO | dict(case.labels),
        "exp_annotations": {"summary": summary, "description": description, "runbook_url": f"r/{name}.md",
                            "dashboard_url": f"d/d/kvobs-{board}"}}
    checked = told | {"promql_expr_test": [], "alert_rule_test": [
        {"eval_time": last, "alertname": name, "exp_alerts": [expected]}]}
    assert promtool(tmp_path, [checked]) == ""
