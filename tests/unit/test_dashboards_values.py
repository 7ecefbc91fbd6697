"""What the boards' queries answer, by Prometheus's own engine over series written by hand."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvobs import dashboards
from tests.dashboard_lint import drawn
from tests.support import program

BOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in dashboards.boards().items()}
WHO = 'job="kvobs", instance="a:1"'
GPU = f'{WHO}, device="cuda:0"'
MIB = 2**20
# Of 1,000 MiB: torch reserved 600, of which 400 are allocated.
DRIVER = {f'kvobs_device_memory_bytes{{{GPU}, part="{part}"}}': size for part, size in (
    ("torch", 600), ("context", 90), ("others", 60), ("unexplained", 50), ("free", 200))}
USAGE = {f'kvobs_allocator_usage_bytes{{{GPU}, state="{state}"}}': size for state, size in (
    ("allocated", 400), ("unused", 200))}
FINE = {f"kvobs_allocator_requested_bytes{{{GPU}}}": 390, f"kvobs_allocator_active_bytes{{{GPU}}}": 420,
        f"kvobs_allocator_inactive_split_bytes{{{GPU}}}": 100}
CACHES = {f'kvobs_kv_usage_bytes{{{GPU}, model="{model}", cache="dynamic", state="{state}"}}': size
          for model, state, size in (("m", "held", 100), ("m", "slack", 30), ("n", "held", 50), ("n", "slack", 0))}
BESIDE = {f'kvobs_kv_usage_bytes{{{WHO}, device="cpu", model="m", cache="dynamic", state="held"}}': 77,
          **{f'kvobs_allocator_usage_bytes{{{WHO}, device="cpu", state="{state}"}}': 140
             for state in ("allocated", "unused")}}


def answers(tmp_path: Path, series: dict[str, Any], asked: dict[str, str],
            expected: dict[str, dict[str, float]]) -> str:
    """What promtool says where the answers to expressions at 10 minutes are not the expected ones; empty where all are.

    A series is a number (constant) or what promtool reads as values at one sample per 15 s.
    """
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"evaluation_interval": "15s", "tests": [{
        "interval": "15s",
        "input_series": [{"series": name, "values": value if isinstance(value, str) else f"{value}+0x40"}
                         for name, value in series.items()],
        "promql_expr_test": [{"expr": asked[name], "eval_time": "10m",
                              "exp_samples": [{"labels": labels, "value": value} for labels, value in found.items()]}
                             for name, found in expected.items()]}]}))
    done = subprocess.run([program("promtool", "prometheus"), "test", "rules", str(file)], capture_output=True,
                          text=True)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def plain(text: str) -> str:
    """An expression with everything chosen, over a minute."""
    for variable, value in (("$__rate_interval", "1m"), ("$job", "kvobs"), ("$instance", ".+"), ("$model", ".*"),
                            ("$device", ".*")):
        text = text.replace(variable, value)
    return text


def panel(board: str, title: str) -> dict[str, str]:
    """The expressions of a panel by legend."""
    [found] = [panel for panel in drawn(BOARDS[f"kvobs-{board}.json"]) if panel["title"] == title]
    renamed: dict[str, str] = {}
    for change in found.get("transformations", ()):
        renamed |= change["options"].get("renameByName", {})
    return {renamed.get(f"Value #{target['refId']}", target["legendFormat"]): plain(target["expr"])
            for target in found["targets"]}


PLACE = '{device="cuda:0", instance="a:1", place="a:1 cuda:0"}'
ALL = {"KV: tokens": 150, "KV: slack": 30, "other tensors": 210, "rounding": 10, "waiting for a stream": 20,
       "free in split segments": 100, "cached, releasable": 80, "between two readings": 0, "context": 90,
       "other processes": 60, "unexplained": 50, "free": 200}
COARSE = {**ALL, "other tensors": 220, "rounding": None, "waiting for a stream": None, "free in split segments": None,
          "cached, releasable": 200}
EXPANDABLE = {**ALL, "free in split segments": None, "cached, releasable": 180}
CACHELESS = {**ALL, "KV: tokens": None, "KV: slack": None, "other tensors": 390}
DRIVERLESS = {**ALL, **dict.fromkeys(("between two readings", "context", "other processes", "unexplained", "free"))}
LATE = {**ALL, "between two readings": 25, "free": 175}
SCENES: dict[str, tuple[dict[str, Any], dict[str, int | None], int]] = {
    "everything is told": (DRIVER | USAGE | FINE | CACHES | BESIDE, ALL, 1000),
    "the allocator tells its two states only": (DRIVER | USAGE | CACHES, COARSE, 1000),
    "expandable segments": (DRIVER | USAGE | CACHES | dict(list(FINE.items())[:2]), EXPANDABLE, 1000),
    "no live cache": (DRIVER | USAGE | FINE, CACHELESS, 1000),
    "no NVML": (USAGE | FINE | CACHES, DRIVERLESS, 600),
    "the driver was read later than the allocator": (
        {**DRIVER, f'kvobs_device_memory_bytes{{{GPU}, part="torch"}}': 625,
         f'kvobs_device_memory_bytes{{{GPU}, part="free"}}': 175} | USAGE | FINE | CACHES, LATE, 1000)}


@pytest.mark.parametrize("scene", SCENES)
def test_the_waterfall_adds_up_to_the_device_s_total(scene: str, tmp_path: Path) -> None:
    """Every part is what it is by hand, and they add up to the total, or to what torch reserved without NVML."""
    series, expected, total = SCENES[scene]
    assert sum(size or 0 for size in expected.values()) == total
    asked = panel("allocator", "Where the device's memory is")
    assert list(asked) == list(ALL)
    assert answers(tmp_path, {name: size * MIB for name, size in series.items()}, asked, {
        name: {} if size is None else {PLACE: size * MIB} for name, size in expected.items()}) == ""


def test_the_c_heap_is_no_device_memory(tmp_path: Path) -> None:
    """What the process's C heap holds is not added to what a device's allocator holds."""
    series = {name: size * MIB for name, size in (USAGE | BESIDE).items()}
    assert answers(tmp_path, series, panel("allocator", "Allocated"), {"all": {"{}": 400 * MIB}}) == ""
    assert answers(tmp_path, series, panel("allocator", "Reserved, unused"), {"all": {"{}": 200 * MIB}}) == ""
    # Of the device a third is unused, of the heap a half.
    shares = (("allocator", "Worst unused", "all", "{}"), ("fleet", "Worst unused", "all", "{}"),
              ("allocator", "Unused share, worst ten", "{{instance}} {{device}}", '{device="cuda:0", instance="a:1"}'),
              ("fleet", "Processes", "Unused share", '{instance="a:1"}'),
              ("fleet", "Unused share, worst ten", "{{instance}}", '{instance="a:1"}'))
    for board, title, legend, labels in shares:
        asked = {name: f"round({text}, 1e-6)" for name, text in panel(board, title).items()}
        assert answers(tmp_path, series, asked, {legend: {labels: 0.333333}}) == "", title


def test_the_values_are_really_compared(tmp_path: Path) -> None:
    """A wrong expectation is not let through."""
    asked = panel("allocator", "Where the device's memory is")
    assert "expr:" in answers(tmp_path, USAGE, asked, {"cached, releasable": {PLACE: 201}})
    assert "expr:" in answers(tmp_path, USAGE, asked, {"free": {PLACE: 0}})


def _up(*values: int) -> dict[str, Any]:
    return {f'up{{job="kvobs", instance="{number}:1"}}': value for number, value in enumerate(values)}


@pytest.mark.parametrize(("up", "down"), [((1, 1, 1), 0), ((1, 0, 0), 2), ((0,), 1), ((), None)])
def test_unreachable_counts_targets(up: tuple[int, ...], down: int | None, tmp_path: Path) -> None:
    """Targets that are down are counted, 0 means that all are up, and without targets there is no number at all."""
    other = {'up{job="node", instance="9:1"}': 0}
    assert answers(tmp_path, {**_up(*up), **other}, panel("overview", "Unreachable"),
                   {"all": {} if down is None else {"{}": down}}) == ""


def _buckets(name: str, rest: str, counts: dict[str, int]) -> dict[str, str]:
    found = {f'{name}_bucket{{{rest}, le="{le}"}}': f"0+{count}x40" for le, count in counts.items()}
    return {**found, f"{name}_count{{{rest}}}": f"0+{counts['+Inf']}x40"}


def test_latency_quantiles_and_the_line_of_the_objective(tmp_path: Path) -> None:
    """Quantiles are interpolated over the buckets of all processes together; the named line is at 12 ms."""
    low = _buckets("kvobs_alloc_latency_seconds", 'job="kvobs", instance="a:1", device="cpu"',
                   {"0.01": 30, "0.012": 30, "0.02": 30, "+Inf": 30})
    high = _buckets("kvobs_alloc_latency_seconds", 'job="kvobs", instance="b:1", device="cpu"',
                    {"0.01": 0, "0.012": 0, "0.02": 10, "+Inf": 10})
    # 40 per step: the 20th lies 2/3 into the first bucket; the 38th is the 8th of 10 between 12 and 20 ms.
    asked = {name: f"round({text}, 1e-6)" for name, text in panel("allocator", "Allocation latency").items()}
    assert answers(tmp_path, {**low, **high}, asked, {
        "p50": {"{}": 0.006667}, "p95": {"{}": 0.0184}, "12 ms: the objective's line": {"{}": 0.012}}) == ""
    series = {name.replace("0.01", "0.001") if 'le="0.01"' in name else name: text for name, text in low.items()}
    asked = panel("overview", "Allocations by latency")
    assert list(asked) == ["within 1 ms", "within 12 ms", "within 100 ms"]
    assert answers(tmp_path, {**series, **high}, asked, {
        "within 1 ms": {"{}": 0.75}, "within 12 ms": {"{}": 0.75}}) == ""
    assert answers(tmp_path, {**low, **high}, panel("overview", "Allocations within 12 ms"),
                   {"{{device}}": {'{device="cpu"}': 0.75}}) == ""


def test_what_did_not_happen_has_no_quantile_no_mean_and_no_share(tmp_path: Path) -> None:
    """Where nothing was counted for a minute there is no sample: neither 0 nor not-a-number."""
    idle = _buckets("kvobs_alloc_latency_seconds", 'job="kvobs", instance="a:1", device="cpu"',
                    {"0.01": 0, "0.012": 0, "0.02": 0, "+Inf": 0})
    moved = _buckets("kvobs_migration_duration_seconds", f'{WHO}, src="cpu", dst="cuda:0"', {"0.01": 0, "+Inf": 0})
    moved[f'kvobs_migration_duration_seconds_sum{{{WHO}, src="cpu", dst="cuda:0"}}'] = "0+0x40"
    still = {f"kvobs_prefix_hit_total{{{WHO}}}": 7, f"kvobs_prefix_queried_total{{{WHO}}}": 9}
    series = {**idle, **moved, **still}
    for board, title in (("overview", "Allocations by latency"), ("allocator", "Within 12 ms"),
                         ("migration", "Duration, p95"), ("overview", "Mean duration of a move"),
                         ("kv-cache", "Prefix hits")):
        asked = panel(board, title)
        assert answers(tmp_path, series, asked, {name: {} for name in asked}) == "", title


def test_the_worst_process_is_shown_not_the_mean(tmp_path: Path) -> None:
    """One process that wastes 90 % is seen beside nine that waste nothing; an empty device has no share."""
    series: dict[str, Any] = {}
    for number in range(10):
        at = f'job="kvobs", instance="{number}:1", device="cuda:0"'
        series[f'kvobs_allocator_usage_bytes{{{at}, state="allocated"}}'] = 10 if number == 3 else 100
        series[f'kvobs_allocator_usage_bytes{{{at}, state="unused"}}'] = 90 if number == 3 else 0
    for state in ("allocated", "unused"):
        series[f'kvobs_allocator_usage_bytes{{job="kvobs", instance="empty:1", device="cuda:1", state="{state}"}}'] = 0
    assert answers(tmp_path, series, panel("allocator", "Worst unused"), {"all": {"{}": 0.9}}) == ""
    asked = panel("overview", "Reserved but unused")
    assert answers(tmp_path, series, asked, {"now, on {{device}}": {'{device="cuda:0"}': 0.9}}) == ""
    assert answers(tmp_path, series, panel("fleet", "Unused share, spread"), {
        "median": {"{}": 0}, "worst": {"{}": 0.9}}) == ""


def test_the_fullest_pool_is_of_all_its_blocks(tmp_path: Path) -> None:
    """The share of blocks in use is of used, cached, free and pinned ones, per pool; the fullest pool counts."""
    def pool(instance: str, used: int, cached: int, free: int, pinned: int) -> dict[str, Any]:
        at = f'job="kvobs", instance="{instance}", model="m", device="cpu", cache="paged"'
        states = (("used", used), ("cached", cached), ("free", free), ("pinned", pinned))
        return {f'kvobs_kv_blocks{{{at}, state="{state}"}}': count for state, count in states}

    series = {**pool("a:1", 5, 3, 1, 1), **pool("b:1", 2, 2, 16, 0)}
    assert answers(tmp_path, series, panel("overview", "Fullest KV pool"), {"all": {"{}": 0.5}}) == ""


def test_burns_and_budgets_take_the_worse_side(tmp_path: Path) -> None:
    """Of two processes the higher burn and the smaller budget are shown, negative budgets too."""
    series: dict[str, Any] = {}
    for instance, burn, budget in (("a:1", 0.5, 0.9), ("b:1", 20, -1.5)):
        at = f'job="kvobs", instance="{instance}", objective="allocation-latency"'
        series[f'kvobs_slo_burn_ratio{{{at}, window="1h"}}'] = burn
        series[f"kvobs_slo_budget_ratio{{{at}}}"] = budget
    assert answers(tmp_path, series, panel("slo-breaker", "Fastest burn, 1 h"), {"all": {"{}": 20}}) == ""
    assert answers(tmp_path, series, panel("slo-breaker", "Least budget left"), {"all": {"{}": -1.5}}) == ""


def _judged(mode: str, priority: str, **outcomes: int) -> dict[str, str]:
    return {f'kvobs_admission_requests_total{{{WHO}, mode="{mode}", priority="{priority}", outcome="{outcome}"}}':
            f"0+{count}x40" for outcome, count in outcomes.items()}


def test_who_is_only_watched_is_not_refused(tmp_path: Path) -> None:
    """Mode observe turns nobody away; a priority of which nobody was admitted has the share 0, not none."""
    series = {**_judged("act", "critical", admitted=3, refused=1), **_judged("act", "normal", refused=2, full=1),
              **_judged("observe", "critical", refused=30), **_judged("observe", "low", admitted=5, late=5)}
    assert answers(tmp_path, series, panel("slo-breaker", "Admitted share by priority"), {
        "{{priority}}": {'{priority="critical"}': 0.75, '{priority="normal"}': 0}}) == ""
    asked = {name: f"round({text}, 1e-6)" for name, text in panel("slo-breaker", "Refused").items()}
    assert answers(tmp_path, series, asked, {"all": {"{}": 0.266667}}) == ""
    observed = _judged("observe", "critical", refused=30)
    assert answers(tmp_path, observed, panel("slo-breaker", "Refused"), {"all": {}}) == ""


@pytest.mark.parametrize(("board", "title", "name", "labels"), [
    ("overview", "Breaker's level", "kvobs_breaker_level", 'scope="cuda:0", mode="act"'),
    ("slo-breaker", "Breaker's level", "kvobs_breaker_level", 'scope="cuda:0", mode="act"'),
    ("slo-breaker", "Burn alerts", "kvobs_slo_alert", 'objective="o", severity="page", windows="5m & 1h"'),
    ("telemetry", "What the overhead guard does", "kvobs_self_throttle", "")])
def test_a_state_between_two_points_is_seen(board: str, title: str, name: str, labels: str, tmp_path: Path) -> None:
    """A state of one scrape, 45 s before the point, is drawn; it is gone from the next point a minute on."""
    series = {f"{name}{{{WHO}{', ' if labels else ''}{labels}}}": "0+0x36 2 0+0x40"}
    kept = labels if "objective" in labels else ", ".join(filter(None, ('instance="a:1"', labels)))
    [asked] = panel(board, title).values()
    later = asked.replace("[1m]", "[1m] offset -1m")
    assert answers(tmp_path, series, {"at": asked, "later": later},
                   {"at": {f"{{{kept}}}": 2}, "later": {f"{{{kept}}}": 0}}) == ""
