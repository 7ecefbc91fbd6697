"""Rules before a real promtool: one test per series, with all alerts that fire at its end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvobs.config import ARTICLE, Objective
from kvobs.dashboards.rules import alert_groups, recording_groups
from tests.rules_cases import STEP_S, Series, Values
from tests.support import program

FIRING = 'ALERTS{alertstate="firing"}'
WHO = {"job": "kvobs", "instance": "a:1"}


def notation(values: Values) -> str:
    return " ".join("_" if value is None else repr(value) for value in values)


def scene(name: str, series: Series, firing: Sequence[Mapping[str, str]], expression: str = FIRING,
          at: int | None = None, step_s: int = STEP_S) -> dict[str, Any]:
    """A promtool test: these alerts (their labels) and no others fire at sample ``at``, which is the last one."""
    last = max(map(len, series.values()), default=80) - 1 if at is None else at
    told = [{"labels": "ALERTS{" + ", ".join(f"{key}={json.dumps(value)}" for key, value in
                                             ({"alertstate": "firing"} | dict(labels)).items()) + "}", "value": 1}
            for labels in firing]
    return {"name": name, "interval": f"{step_s}s",
            "input_series": [{"series": key, "values": notation(values)} for key, values in series.items()],
            "promql_expr_test": [{"expr": expression, "eval_time": f"{last * step_s}s", "exp_samples": told}]}


def promtool(folder: Path, scenes: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]] | None = None,
             objectives: Sequence[Objective] = (ARTICLE,), step_s: int = STEP_S) -> str:
    """What promtool complains about, empty if about nothing."""
    found = groups if groups is not None else [*recording_groups(objectives), *alert_groups(objectives, "r", "d")]
    (folder / "rules.yaml").write_text(json.dumps({"groups": found}))
    (folder / "tests.yaml").write_text(json.dumps(
        {"rule_files": ["rules.yaml"], "evaluation_interval": f"{step_s}s", "tests": scenes}))
    done = subprocess.run([program("promtool", "prometheus"), "test", "rules", "tests.yaml"], cwd=folder, text=True,
                          capture_output=True, check=False, timeout=300)
    return "" if done.returncode == 0 else done.stdout + done.stderr
