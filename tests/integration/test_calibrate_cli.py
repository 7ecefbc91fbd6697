"""``kvobs calibrate`` as a user runs it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvobs.breaker import parse_policy
from kvobs.cli import main
from tests.support import child_environment, run_child

KVOBS = [sys.executable, "-m", "kvobs"]
ASKED = ["--signal", "cpu", "--latency", "latency_ms", "--slo", "12ms", "--quantile", ".95", "--delta", ".1"]


def kvobs(*words: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
    return run_child([*KVOBS, *words], env=child_environment(**settings))


@pytest.fixture
def load(tmp_path: Path) -> Path:
    """Half an hour in which the latency misses 12 ms just where the load was above 0.8, and one row without either."""
    numbers = random.Random(11)
    rows = []
    for at in range(1_800):
        cpu = numbers.random()
        rows.append(f"{at},{cpu:.6f},{15 if cpu > 0.8 else 3}")
    found = tmp_path / "load.csv"
    found.write_text("\n".join(["t,cpu,latency_ms", *rows, "1800,,"]) + "\n")
    return found


def above(line: str) -> float:
    """The threshold of a printed condition, as the breaker reads it."""
    level = f"[[level]]\nany = [{line}]\n"
    leaf, = parse_policy(f'name = "one"\n{level * 3}', "the output").levels[0].condition.conditions
    assert leaf.signal == "cpu"
    return float(leaf.above)


def test_the_condition_is_printed_last(load: Path) -> None:
    """The last line is a condition that the breaker reads, with a threshold that the known truth allows."""
    done = kvobs("calibrate", load, *ASKED, "--window", "1s")
    assert (done.returncode, done.stderr) == (0, "")
    assert 0.8 <= above(done.stdout.splitlines()[-1]) <= 0.8 / 0.95
    assert "1,801 samples (1 lack the signal or the latency) made 1,800 windows of 1 s" in done.stdout
    assert "P(F >= 0.683) is 0.490" in done.stdout


def test_json_has_the_condition_as_a_field(load: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under --json there is one object with the same condition and numbers; the page shows it too and stands alone."""
    html = tmp_path / "page.html"
    words = ["calibrate", str(load), *ASKED, "--window", "1s"]
    assert main([*words, "--json", "--html", str(html)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    assert found["fragment"] == capsys.readouterr().out.splitlines()[-1]
    assert above(found["fragment"]) == found["threshold"]
    assert found["windows"] == 1_800
    text = html.read_text(encoding="utf-8")
    assert f"above = {found['threshold']!r}" in text
    assert "http://" not in text.replace("http-equiv", "")
    assert not list(tmp_path.glob(".kvobs-*"))


def test_abstention_is_said_with_exit_code_1(load: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows of two minutes are too few: no condition, a sentence with what is needed, and exit code 1."""
    done = kvobs("calibrate", load, *ASKED, "--window", "120s")
    assert (done.returncode, done.stderr) == (1, "")
    assert "No threshold is given: 15 windows are fewer than the least number, 45" in done.stdout.splitlines()[-1]
    assert main(["calibrate", str(load), *ASKED, "--window", "120s", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fragment"] is None


def test_a_store_of_a_real_process(tmp_path: Path) -> None:
    """A store that a process wrote is read: without turns or allocations it is one sentence and exit code 2."""
    settings = {"KVOBS_STORE": str(tmp_path / "store"), "KVOBS_PROMETHEUS": "off"}
    ran = run_child([sys.executable, "-c", "import kvobs\nwith kvobs.instrument():\n    pass"],
                    env=child_environment(**settings))
    assert ran.returncode == 0, ran.stderr
    done = kvobs("calibrate", tmp_path / "store", "--signal", "kvobs.heap.trimmable", "--latency",
                 "gen_ai.server.time_to_first_token", **settings)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no values of" in done.stderr


@pytest.mark.parametrize(("words", "why"), [
    (["--slo", "12"], "--slo: '12' is no duration above zero"), (["--slo", "0ms"], "--slo: '0ms' is no duration"),
    (["--window", "0s"], "--window: '0s' is no duration above zero"), (["--delta", "0"], "--delta: '0' is no share"),
    (["--quantile", "1"], "--quantile: '1' is no share"), (["--where", "a=b"], "--where belongs to stores"),
    (["--signal", "gpu"], "there is no column 'gpu'"), (["--html", "."], "it is no regular file")])
def test_what_is_wrong_is_one_sentence(load: Path, words: list[str], why: str,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    """An option that cannot be is refused with one sentence and exit code 2."""
    assert main(["calibrate", str(load), *ASKED, *words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert why in said.err


def test_files_that_cannot_be_read_are_one_sentence(load: Path, tmp_path: Path,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file, one that is no text, and a page in place of its data are refused, and nothing is changed."""
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for words, why in (([tmp_path / "none.csv"], "There is nothing at"), ([binary], "cannot be read as CSV"),
                       ([load, "--html", load], "would take the place of the data")):
        assert main(["calibrate", *map(str, words), *ASKED]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert why in said.err
    assert load.read_text().startswith("t,cpu")
