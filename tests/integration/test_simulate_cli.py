"""``kvobs breaker simulate`` on load shapes, traces and stores."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from kvobs.breaker import load_policy
from kvobs.breaker.simulator import Server, figures, scenario
from kvobs.breaker.simulator import simulate as run
from kvobs.catalog import BY_NAME
from kvobs.cli._breaker_simulate import simulate
from kvobs.cli._errors import Refused
from kvobs.store import StoreWriter
from tests.support import ROOT, child_environment, run_python

SECOND = 10**9
BEGAN = 1_700_000_000 * SECOND
SHARED = ROOT.parent / "shared" / "data" / "serving"
SHED = """
name = "shed"
[[level]]
any = [{ signal = "waiting", above = 5, release = 1 }]
[[level]]
any = [{ signal = "waiting", above = 10, release = 1 }]
[[level]]
any = [{ signal = "waiting", above = 20, release = 1 }]
"""
# The command alone, as a process.
COMMAND = """
import sys, typer
from kvobs.cli._breaker_simulate import simulate
app = typer.Typer()
app.command()(simulate)
app(sys.argv[1:], standalone_mode=False)
"""


@pytest.fixture
def shed(tmp_path: Path) -> Path:
    path = tmp_path / "shed.toml"
    path.write_text(SHED)
    return path


def invoke(*arguments: str | Path) -> None:
    app = typer.Typer()
    app.command()(simulate)
    get_command(app).main([str(one) for one in arguments], standalone_mode=False)


def document(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    invoke(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def test_a_scenario_compares_policies_with_no_breaker(capsys: pytest.CaptureFixture[str], shed: Path) -> None:
    """The document has the figures of the library's runs, no breaker first, each with its transitions, all modelled."""
    found = document(capsys, "--scenario", "burst", "--limit", "300", "--rate", "4", "--policy", "default", "--policy",
                     shed, "--seed", "7", "--set", "slots=16")
    load, server = scenario("burst", seed=7, rate=4, limit=300), Server(slots=16)
    assert found["modelled"] is True
    assert [one["policy"] for one in found["runs"]] == ["no breaker", "default", "shed"]
    for one, policy in zip(found["runs"], (None, load_policy("default"), load_policy(str(shed))), strict=True):
        made = run(load, server, policy, seed=7)
        expected = figures(made, server)
        assert {name: one[name] for name in ("met", "goodput_tokens", "cut_tokens", "refused", "preemptions")} == {
            name: getattr(expected, name) for name in ("met", "goodput_tokens", "cut_tokens", "refused", "preemptions")}
        assert len(one["listed"]) == one["transitions"] == len(made.transitions)
    assert found["runs"][2]["refusals"] > 0
    assert found["runs"][2]["listed"][0]["reason"] == "Level 1 (reorganise) is open: its condition holds."
    assert {row["name"]: row["value"] for row in found["server"]}["blocks"] == server.blocks
    assert all(row["source"] for row in found["server"])


def test_the_table_says_the_same_as_the_document(capsys: pytest.CaptureFixture[str], shed: Path) -> None:
    """Goodput, transitions and constants in the table are those of the document; the same call prints the same."""
    arguments = ("--scenario", "burst", "--limit", "300", "--rate", "4", "--policy", shed, "--set", "slots=16")
    invoke(*arguments)
    shown = capsys.readouterr().out
    invoke(*arguments)
    assert capsys.readouterr().out == shown
    goodput = [f"{one['goodput_tokens']:,}" for one in document(capsys, *arguments)["runs"]]
    assert re.search(r"^goodput, tokens +(\S+) +(\S+)$", shown, re.MULTILINE).groups() == tuple(goodput)  # type: ignore[union-attr]
    assert "Level 3 (degrade) is open: its condition holds. [waiting " in shown
    assert "slots=16" in shown
    assert "modelled" in shown


def test_a_signal_that_is_not_told_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The article's preset never acts in the model, which is said with its caveat."""
    invoke("--scenario", "steady", "--limit", "50", "--policy", "article")
    shown = capsys.readouterr().out
    assert "article made no transition." in shown
    assert "fragmentation_article, cpu, gateway_p99, pool_use, which nothing tells here" in shown
    assert "P(F >= 0.683) = 0.490" in shown


def test_a_mooncake_trace_has_its_prefix_hits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ten requests a minute apart with the same two chunks of 512 in 1,100 tokens find them nine times."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"timestamp": 60_000 * at, "input_length": 1_100, "output_length": 4,
                                         "hash_ids": [1, 2, 100 + at]}) + "\n" for at in range(10)))
    runs = document(capsys, "--trace", trace)["runs"]
    assert [one["hit_share"] for one in runs] == [pytest.approx(9 * 1_024 / 11_000)] * 2
    assert [one["computed_tokens"] for one in runs] == [10 * 1_103 - 9 * 1_024] * 2


def test_the_first_of_azures_requests_pass_under_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 500 public requests, every one ends once under each policy, and none is lost."""
    trace = SHARED / "AzureLLMInferenceTrace_conv.csv"
    if not trace.is_file():
        pytest.skip(f"{trace.name} of the shared data is not beside the project.")
    for one in document(capsys, "--trace", trace, "--limit", "500", "--rate", "2")["runs"]:
        assert one["finished"] + one["refused"] + one["out_of_memory"] == 500 == one["requests"]


def stored(directory: Path, *, process: str = "engine", series: bool = True) -> None:
    """A process of 100 s: two preemptions a second from second 30 to 49, an error at second 60."""
    now = [0]
    writer = StoreWriter(directory, 64 << 20, process, clock=lambda: now[0], wall=lambda: BEGAN)
    who = ("m", "cpu", "c")
    for at in range(100):
        now[0] = at * SECOND
        preempted = float(min(max(0, 2 * (at - 29)), 40))
        points: list[Any] = [(BY_NAME["kvobs.kv.preemptions"], {who: preempted})] if series else [
            (BY_NAME["process.memory.usage"], {(): 1.0})]
        if series and at >= 60:
            points.append((BY_NAME["kvobs.out_of_memory"], {("m",): 1.0}))
        writer.write_points(points)
        writer.commit()
    writer.close()


PREEMPTED = """
name = "preempted"
[[level]]
any = [{ signal = "preemption_rate", above = 1 }]
[[level]]
any = [{ signal = "waiting", above = 1000 }]
[[level]]
any = [{ signal = "waiting", above = 1000 }]
"""


def test_a_store_is_replayed_under_another_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """More than one preemption a second holds from the sixth second of the burst on: one opening, which the rest of
    the burst followed, and of two troubles the error was foreseen.
    """
    stored(tmp_path / "store")
    policy = tmp_path / "preempted.toml"
    policy.write_text(PREEMPTED)
    found = document(capsys, "--store", tmp_path / "store", "--policy", policy, "--horizon", "30s")
    one, = found["replays"]
    assert (one["process"], one["instants"]) == ("engine", 100)
    assert (one["opened"], one["followed"], one["foreseen"]) == (1, 1, 1)
    assert (one["precision"], one["recall"]) == (1.0, 0.5)
    assert [trouble["kind"] for trouble in one["troubles"]] == ["preemption burst", "out of memory"]
    assert one["listed"][0]["t_ns"] == BEGAN + 35 * SECOND
    assert one["listed"][0]["readings"] == {"preemption_rate": 1.2}
    assert "effects are unknown" in found["notes"][0]
    assert any(row["signal"] == "preemption_rate" for row in found["mapping"])
    invoke("--store", tmp_path / "store", "--policy", policy, "--horizon", "30s")
    shown = capsys.readouterr().out
    assert re.search(r"^engine +preempted +100 +1 +1 \(100%\) +2 +1 \(50%\)$", shown, re.MULTILINE)
    assert "2023-11-14 22:13:55Z  Level 1 (reorganise) is open: its condition holds. [preemption_rate 1.2]" in shown
    assert "2023-11-14 22:14:20Z  out of memory" in shown


@pytest.mark.parametrize(("arguments", "says"), [
    ((), "Name one of --store, --scenario and --trace."),
    (("--scenario", "steady", "--trace", "x"), "not --scenario and --trace."),
    (("--scenario", "stormy"), "There is no scenario 'stormy'; allowed are steady, rising, burst, idle."),
    (("--trace", "/nowhere.csv"), "cannot be read"),
    (("--store", "/nowhere"), "There is no store at /nowhere."),
    (("--scenario", "steady", "--policy", "/nowhere.toml"), "There is no policy '/nowhere.toml'"),
    (("--scenario", "steady", "--set", "block=1"), "did you mean 'blocks'?"),
    (("--scenario", "steady", *(["--policy", "default"] * 9)), "There are 9 policies; allowed are 8."),
])
def test_what_cannot_be_is_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    """Each refusal says what is wrong and what is allowed."""
    with pytest.raises(Refused) as refused:
        invoke(*arguments)
    assert says in str(refused.value)


def test_a_store_without_the_metrics_is_refused(tmp_path: Path) -> None:
    """A store of a process that told nothing that signals come from, and a bad horizon, are one sentence."""
    stored(tmp_path / "store", series=False)
    with pytest.raises(Refused, match="recorded none of the metrics"):
        invoke("--store", tmp_path / "store")
    with pytest.raises(Refused, match="--horizon is 'soon'"):
        invoke("--store", tmp_path / "store", "--horizon", "soon")


def test_progress_is_for_terminals(tmp_path: Path) -> None:
    """A bar is drawn on a terminal's stderr, nothing is written to a pipe, and stdout is the same either way."""
    arguments = ("--scenario", "burst", "--limit", "300")
    piped = run_python(COMMAND, *arguments)
    assert (piped.returncode, piped.stderr) == (0, "")
    ours, theirs = pty.openpty()
    with (tmp_path / "out").open("wb") as out:
        child = subprocess.Popen([sys.executable, "-c", COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=out,
                                 stderr=theirs, cwd=ROOT, env=child_environment(TERM="xterm"))
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # the terminal is gone with its last writer
        while more := os.read(ours, 65_536):
            drawn += more
    os.close(ours)
    assert child.wait(60) == 0
    assert b"Simulating default" in drawn
    assert (tmp_path / "out").read_text() == piped.stdout
