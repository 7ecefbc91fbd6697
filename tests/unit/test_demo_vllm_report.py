"""The tables of the demo with vLLM: from what was told and stored, by hand arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvobs import model
from kvobs.lab.demo import _vllm_report, _vllm_script
from kvobs.lab.demo._vllm_process import Told
from kvobs.store import StoreWriter
from tests.events import turn

ORIGIN = model.Origin("vllm", "tiny", "BlockPool", "cpu", "float32")
SECOND = 1_000_000_000
WALL = 100 * SECOND  # of the monotonic clock's zero
TOKEN_BYTES = 10
POOL_BYTES = TOKEN_BYTES * _vllm_script.POOL_BLOCKS * _vllm_script.BLOCK_TOKENS


def at(t_s: float) -> int:
    return round(t_s * SECOND)


def phase(request: str, session: str, name: str, start_s: float, end_s: float, blocks: int = 0,
          outcome: str = "") -> model.RequestPhase:
    return model.RequestPhase(at(end_s), at(start_s), ORIGIN, 7, request, session, name, outcome, blocks)


def ended(session: str, number: int, t_s: float, written: int, **fields: Any) -> model.Turn:
    values: dict[str, Any] = {
        "t_ns": at(t_s), "origin": ORIGIN, "cache_id": 7, "session": session, "turn": number, "prompt_tokens": 40,
        "cached_tokens": 0, "new_tokens": 48, "kv_reserved_bytes": POOL_BYTES, "bytes_written": written * TOKEN_BYTES,
        "ttft_ns": at(1.5), "tpot_ns": at(0.25)}
    return turn(**values | fields)


EVENTS = (
    model.Preemption(at(3), ORIGIN, 7, "b1", "lisbon", "blocks", "a1", 60, 2, (("a1", 3),)),
    model.Preemption(at(6), ORIGIN, 7, "b2", "lisbon", "blocks", "a2", 90, 3, (("a2", 3),)),
    phase("a1", "balcony", "queued", 1, 2), phase("a1", "balcony", "decode", 2, 4, 3, "ok"),
    phase("b1", "lisbon", "queued", 1.1, 2), phase("b1", "lisbon", "decode", 2, 3, 2),
    phase("b1", "lisbon", "preempted", 3, 4), phase("b1", "lisbon", "decode", 4, 5, 4, "ok"),
    phase("a2", "balcony", "decode", 5.1, 7, 5, "ok"), phase("b2", "lisbon", "decode", 5.2, 8, 6, "ok"),
    # The second turn comes first into the store: rows are ordered by session and turn.
    ended("lisbon", 2, 8, 110 - 64 + 47, prompt_tokens=110, cached_tokens=64, ttft_ns=None, tpot_ns=None),
    ended("balcony", 1, 4, 40 + 47), ended("lisbon", 1, 5, 40 + 47 + 30), ended("balcony", 2, 7, 40 + 47),
    ended("somebody else", 1, 8, 1),
)
METRICS = (  # name, attributes, after the first turns, after the second
    ("kvobs.kv.preemptions", {}, 1, 2), ("kvobs.kv.block.failures", {}, 10, 32),
    ("kvobs.kv.admission.failures", {}, 9, 30), ("kvobs.kv.block.evictions", {"reason": "pressure"}, 2, 29),
    ("kvobs.kv.block.evictions", {"reason": "dropped"}, 500, 500),
    ("kvobs.kv.recomputed", {"cause": "preempted"}, 30, 30),
    ("kvobs.kv.recomputed", {"cause": "evicted"}, 0, 352), ("kvobs.prefix.hit", {"admission": "first"}, 0, 160),
    ("kvobs.prefix.hit", {"admission": "resumed"}, 32, 288),
    ("kvobs.prefix.queried", {"admission": "first"}, 314, 1154),
    ("kvobs.prefix.queried", {"admission": "resumed"}, 128, 386),
    *(("kvobs.kv.blocks", {"state": state}, value, value)
      for state, value in (("used", 0), ("cached", 16), ("free", 3), ("pinned", 1))),
)
OWN = {"vllm:num_preemptions_total": (1, 2), "vllm:kv_block_lifetime_seconds_count": (8, 43),
       "vllm:kv_cache_usage_perc": (0.0, 0.0), "vllm:prefix_cache_hits_total": (0, 160),
       "vllm:prefix_cache_queries_total": (314, 1154)}


def told(*left_out: str) -> Told:
    """The second preemption was counted 2.5 s after it happened."""
    turns = [{"engine": {name: values[number] for name, values in OWN.items() if name not in left_out},
              "kvobs": [[row[0], row[1], row[2 + number]] for row in METRICS]} for number in range(2)]
    return Told("0.32.0", turns, [WALL + at(3.25), WALL + at(8.5)], "one")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    writer = StoreWriter(tmp_path, 8 << 20, "one", clock=lambda: 9 * SECOND, wall=lambda: WALL + 9 * SECOND)
    writer.write(EVENTS)
    writer.commit()
    writer.close()
    return tmp_path


def test_figures_are_differences_by_turn(store: Path) -> None:
    """Counters that grew over both turns are shown as their sum and as each turn's part, vLLM's beside kvobs's."""
    lines = {line.name: line for line in _vllm_report.figures(told(), store)}
    assert {name: (line.engine_text, line.happened_text) for name, line in lines.items()} == {
        "The pool after the first turns": ("0 % used", "0 used, 16 cached, 3 free, 1 pinned"),
        "Preemptions": ("2 (1 + 1)", "2 (1 + 1)"),
        "Failed allocations": ("-", "32 (10 + 22)"),
        "Evicted blocks": ("43 (8 + 35)", "29 (2 + 27)"),
        "Prompt tokens found in the prefix cache": (
            "160 of 1,154", "160 of 1,154, and 288 of 386 when preempted requests came back"),
        "Tokens computed twice": ("-", "382 (30 + 352)"),
    }
    assert "up to 2.5 s late here;" in lines["Preemptions"].why
    assert "30 were of waiting requests" in lines["Failed allocations"].why
    assert lines["Evicted blocks"].happened == [2, 27]
    assert lines["Failed allocations"].engine is None


def test_what_a_vllm_does_not_have_is_absent(store: Path) -> None:
    """A metric that this vLLM lacks is no zero: nothing in JSON, a dash in the table."""
    for line in _vllm_report.figures(told(*OWN), store):
        assert (line.engine, line.engine_text) == (None, "-")


def test_rows_are_the_turns_of_the_dialogues(store: Path) -> None:
    """By session and turn: preemptions of its request, tokens beyond prompt - cached + new - 1, blocks at its end."""
    rows = _vllm_report.sessions(told(), store)
    assert [(row.session, row.turn, row.preemptions, row.recomputed_tokens, row.blocks) for row in rows] == [
        ("balcony", 1, 0, 0, 3), ("balcony", 2, 0, 0, 5), ("lisbon", 1, 1, 30, 4), ("lisbon", 2, 0, 0, 6)]
    assert [(row.ttft_s, row.tpot_s) for row in rows] == [(1.5, 0.25)] * 3 + [(None, None)]


def test_tables_and_json_say_the_same(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every sentence and every session is on the page whole, and each JSON line is an object of its kind."""
    lines, rows = _vllm_report.figures(told(), store), _vllm_report.sessions(told(), store)
    _vllm_report.print_tables(lines, rows)
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= _vllm_report.WIDTH
    words = page.split()
    for line in lines:
        for word in (*line.why.split(), *line.happened_text.split(), *line.engine_text.split()):
            assert word in words
    assert [row.split()[:2] for row in page.splitlines() if row.startswith(("balcony ", "lisbon "))] == [
        ["balcony", "1"], ["balcony", "2"], ["lisbon", "1"], ["lisbon", "2"]]
    _vllm_report.print_json(told(), lines, rows)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["kind"] for one in found] == ["figure"] * 6 + ["turn"] * 4
    assert [one["why"] for one in found[:6]] == [line.why for line in lines]
    assert found[6]["vllm_version"] == "0.32.0"
    assert found[-1]["ttft_s"] is None
