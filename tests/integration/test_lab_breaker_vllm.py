"""The experiment with the breaker on real vLLM servers, with a tiny random model and one pair of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.proto", reason="The OTLP exporters are not installed (extra otel).")
from kvobs.lab.breaker_vllm._plan import TURNS
from kvobs.lab.breaker_vllm._run import Results, measure, table
from tests.vllm_server import interpreter, make_model

pytestmark = [pytest.mark.slow, pytest.mark.peer]
SESSIONS = 4


def test_a_pair_of_runs_is_measured(tmp_path: Path) -> None:
    """Both arms serve every turn of the same sessions to its last token, as vLLM's own counter says too, and what was
    kept after the last run is what is returned.
    """
    trace = tmp_path / "trace.jsonl"  # lines of 12 words, answers of 40 tokens: the tiny model's context is short
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 288, "output_length": 120}) + "\n")
    kept: list[Results] = []
    results = measure(Path(interpreter()), "", make_model(tmp_path), arms=("off", "act"), runs=1, sessions=SESSIONS,
                      trace=trace, policy="default", keep=kept.append, options=("--load-format", "dummy"))
    assert kept[-1] == results
    assert [run.arm for run in results.runs] == ["off", "act"]
    for run in results.runs:
        assert run.figures["turns"] == SESSIONS * TURNS
        assert run.figures["refusals"] == 0
        assert run.figures["throughput"] * run.figures["seconds"] == pytest.approx(40 * SESSIONS * TURNS)
        assert run.figures["generated"] == 40 * SESSIONS * TURNS
    assert next(run for run in results.runs if run.arm == "off").figures["transitions"] == 0
    assert "act against off" in table(results)
