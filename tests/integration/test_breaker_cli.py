"""A breaker in a real process: its decisions are read by ``kvobs breaker``, and an operator's word reaches it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.store import StoreReader, StoreWriter
from tests import events
from tests.peers import http_get
from tests.support import ROOT, child_environment, run_child, wait_until

POLICY = """
name = "load"
escalate = "500ms"
jitter = 0
[[level]]
any = [{ signal = "app.load", above = 1, max_age = "600s" }]
open = "500ms"
half_open = "500ms"
[[level]]
any = [{ signal = "app.load", above = 2, max_age = "600s" }]
open = "500ms"
half_open = "500ms"
[[level]]
any = [{ signal = "app.load", above = 3, max_age = "600s" }]
"""
CHILD = """
import sys
import kvobs
with kvobs.instrument() as observed:
    print("up", flush=True)
    for line in sys.stdin:
        observed.report("app.load", float(line))
"""


def kvobs(*words: object) -> subprocess.CompletedProcess[str]:
    return run_child([sys.executable, "-m", "kvobs", *map(str, words)], cwd=ROOT)


class Watched:
    """A process with a breaker, whose load is told to it."""

    def __init__(self, directory: Path, mode: str) -> None:
        (directory / "policy.toml").write_text(POLICY)
        self.store, self.mode = directory / "store", mode
        self.child = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=child_environment(KVOBS_STORE=str(self.store), KVOBS_PROMETHEUS="127.0.0.1:0", KVOBS_OTLP="off",
                                  KVOBS_BREAKER=mode, KVOBS_BREAKER_POLICY=str(directory / "policy.toml")))
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "up\n"

    def load(self, value: float) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{value}\n")
        self.child.stdin.flush()

    def status(self) -> list[dict[str, Any]]:
        done = kvobs("breaker", "status", self.store, "--json")
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def log(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(kvobs("breaker", "log", self.store, "--json").stdout)
        return found

    def decided(self) -> list[tuple[int, str]]:
        return [(one["level"], one["after"]) for one in self.log() if one["what"] == "decision"]

    def reaches(self, level: int) -> None:
        wait_until(lambda: [row["level"] for row in self.status()] == [level], 60, f"level {level}")


@pytest.fixture(params=["observe", "act"])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path, request.param)
    try:
        yield found
    finally:
        found.child.communicate(timeout=60)


def test_decisions_are_told_and_operators_are_obeyed(watched: Watched) -> None:
    """Under load level 2 is reached from below; without it, level 0 from above; an operator's level holds until it is
    given back; every decision is in the log with what was read.
    """
    watched.reaches(0)
    watched.load(2.5)
    watched.reaches(2)
    watched.load(0.0)
    watched.reaches(0)
    done = kvobs("breaker", "set", "1", watched.store)
    assert done.returncode == 0, done.stderr
    assert f"(pid {watched.child.pid})" in done.stdout
    watched.reaches(1)
    assert kvobs("breaker", "set", "auto", watched.store).returncode == 0
    watched.reaches(0)
    wait_until(lambda: watched.decided()[-1:] == [(1, "closed")] and len(watched.decided()) > 6, 60, "the end of it")
    told = watched.log()
    decided = [one for one in told if one["what"] == "decision"]
    walk = [(one["level"], one["after"]) for one in decided]
    assert walk == [(1, "open"), (2, "open"), (2, "half-open"), (2, "closed"), (1, "half-open"), (1, "closed"),
                    (1, "open"), (1, "half-open"), (1, "closed")]
    assert decided[1]["readings"] == [["app.load", 2.5]]
    assert (len(told) > len(decided)) == (watched.mode == "act")  # the C heap of any process can be trimmed
    plain = kvobs("breaker", "log", watched.store).stdout.splitlines()
    assert len(plain) == len(told)
    assert any("process: Level 2 (offload) is open: its condition holds. Read: app.load 2.5." in line for line in plain)


@pytest.mark.parametrize("watched", ["act"], indirect=True)
def test_a_policy_is_reloaded_in_a_running_process(watched: Watched) -> None:
    """With the file's thresholds raised the load that opened level 1 opens nothing any more, and the status says which
    policy is in force since when.
    """
    watched.load(1.5)
    watched.reaches(1)
    before, = watched.status()
    file = watched.store.parent / "policy.toml"
    assert before["policy"] == f"load of {file}."
    file.write_text(POLICY.replace("above = ", "above = 1").replace('"load"', '"higher"'))
    watched.reaches(0)
    after, = watched.status()
    assert after["policy"] == f"higher of {file}, reloaded once."
    assert after["policy_wall_ns"] > before["policy_wall_ns"]
    plain = kvobs("breaker", "status", watched.store).stdout
    assert f": higher of {file}, reloaded once." in " ".join(plain.split())


@pytest.mark.parametrize("watched", ["act"], indirect=True)
def test_an_operator_s_word_comes_over_http_too(watched: Watched) -> None:
    """The process's own endpoint takes a level with the token beside its store, and tells it as the CLI does."""
    watched.reaches(0)
    one, = StoreReader(watched.store).processes()
    assert one.endpoint is not None
    url = one.endpoint.removesuffix("/metrics") + "/breaker"
    token = (watched.store / "control-token").read_text().strip()

    def hold(level: int | None) -> int:
        request = urllib.request.Request(f"{url}/hold", json.dumps({"level": level}).encode(), {
            "Content-Type": "application/json", "Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)

    assert hold(1) == 202
    watched.reaches(1)
    document = json.loads(http_get(url)[2])
    assert (document["process"], document["scopes"]["process"]["held"]) == (one.process, 1)
    assert hold(None) == 202
    watched.reaches(0)


def test_refusals_are_one_sentence(tmp_path: Path) -> None:
    """No store, no such level, and a store whose processes have no breaker: exit code 2 and one sentence each."""
    writer = StoreWriter(tmp_path / "store", 8 << 20, "one")
    writer.write([events.turn()])
    writer.commit()
    writer.close()
    for words, sentence in (
            (("status", tmp_path / "no"), f"There is no store at {tmp_path / 'no'}."),
            (("set", "4", tmp_path / "store"), "There is no level '4'; allowed are 0 to 3 and auto."),
            (("reset", tmp_path / "store"), "No process of this store runs with a breaker.")):
        done = kvobs("breaker", *words)
        assert (done.returncode, done.stderr.strip()) == (2, f"kvobs: {sentence}")
    done = kvobs("breaker", "status", tmp_path / "store")
    assert (done.returncode, done.stdout.split(";")[0]) == (0, "No process of this store had a breaker")


def test_run_refuses_a_bad_policy(tmp_path: Path) -> None:
    """``kvobs run`` checks the policy before it becomes the command."""
    (tmp_path / "bad.toml").write_text(POLICY.replace("above = 3", "abve = 3"))
    done = kvobs("run", "--breaker", "observe", "--breaker-policy", tmp_path / "bad.toml", "--", "true")
    assert done.returncode == 2
    assert "level 3 has no key 'abve'; did you mean 'above'?" in done.stderr
