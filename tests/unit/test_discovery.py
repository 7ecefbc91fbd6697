"""The files by which Prometheus finds the endpoints of all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvobs.catalog import ROWS, prometheus_label
from kvobs.discovery import DIRECTORY, SWEEP_NS, Targets, entry
from kvobs.model import ProcessRole
from tests.support import ROOT, child_environment

ROLE = ProcessRole(1, "vllm", "worker", (("dp", 0), ("tp", 1)))
URL = "http://127.0.0.1:9464/metrics"
# Keeps its entry and says so, then lives until it is killed.
OWNER = """
import sys
from pathlib import Path
from kvobs.discovery import Targets
targets = Targets(Path(sys.argv[1]), "other", "http://127.0.0.1:9465/metrics")
targets.keep(0, None)
print("kept", flush=True)
sys.stdin.read()
"""


def listed(directory: Path) -> set[str]:
    return {path.name for path in (directory / DIRECTORY).iterdir()}


def test_an_entry_is_what_prometheus_reads() -> None:
    """A list with one group: the endpoint's host and port, and texts as labels, none of which a metric of ours has."""
    group, = json.loads(entry(URL, "abc", ROLE))
    assert group == {"targets": ["127.0.0.1:9464"], "labels": {
        "kvobs_process": "abc", "kvobs_pid": str(os.getpid()), "kvobs_engine": "vllm", "kvobs_role": "worker",
        "kvobs_ranks": "dp=0 tp=1"}}
    ours = {prometheus_label(attribute) for row in ROWS for attribute in row.attributes}
    assert ours.isdisjoint(group["labels"])
    assert json.loads(entry("http://[::1]:9464/metrics", "abc", None))[0]["targets"] == ["[::1]:9464"]


def test_an_entry_lives_as_long_as_its_process_serves(tmp_path: Path) -> None:
    """It is there from the first call, says the role once that is known, and is gone at the end, wholly."""
    targets = Targets(tmp_path, "abc", URL)
    targets.keep(0, None)
    path = tmp_path / DIRECTORY / "abc.json"
    assert path.read_text() == entry(URL, "abc", None)
    targets.keep(1, ROLE)
    assert path.read_text() == entry(URL, "abc", ROLE)
    targets.close()
    targets.close()
    assert listed(tmp_path) == set()


def test_an_entry_is_written_again_only_when_it_changes_or_is_gone(tmp_path: Path) -> None:
    """Prometheus is not told of news that are none; what somebody removed comes back."""
    targets = Targets(tmp_path, "abc", URL)
    targets.keep(0, ROLE)
    path = tmp_path / DIRECTORY / "abc.json"
    written = path.stat().st_ino
    targets.keep(SWEEP_NS, ROLE)
    assert path.stat().st_ino == written
    path.unlink()
    targets.keep(2 * SWEEP_NS, ROLE)
    assert path.exists()
    targets.close()


def test_what_a_killed_process_left_is_removed_by_others(tmp_path: Path) -> None:
    """The entry of a process that lives is left alone; once it was killed, the next sweep of another removes it."""
    child = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, env=child_environment(),
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdin is not None
    try:
        assert child.stdout.readline() == b"kept\n"
        targets = Targets(tmp_path, "abc", URL)
        targets.keep(0, None)
        assert {"abc.json", "other.json"} <= listed(tmp_path)
        targets.keep(SWEEP_NS, None)
        assert {"abc.json", "other.json"} <= listed(tmp_path)
    finally:
        child.kill()
        child.wait(timeout=10)
        child.stdin.close()
        child.stdout.close()
    targets.keep(2 * SWEEP_NS - 1, None)
    assert "other.json" in listed(tmp_path)
    targets.keep(2 * SWEEP_NS, None)
    assert listed(tmp_path) == {"abc.json", "abc.lock"}
    targets.close()


def test_the_last_process_of_a_server_leaves_nothing_behind(tmp_path: Path) -> None:
    """One that ends removes the entries of those killed before, and none of one that lives."""
    owners = [subprocess.Popen([sys.executable, "-c", OWNER.replace('"other"', f'"{name}"'), str(tmp_path)], cwd=ROOT,
                               env=child_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
              for name in ("dead", "lives")]
    try:
        for child in owners:
            assert child.stdout is not None
            assert child.stdout.readline() == b"kept\n"
        targets = Targets(tmp_path, "abc", URL)
        targets.keep(0, None)
        owners[0].kill()
        owners[0].wait(timeout=10)
        assert {"abc.json", "dead.json", "lives.json"} <= listed(tmp_path)
        targets.close()
        assert listed(tmp_path) == {"lives.json", "lives.lock"}
    finally:
        for child in owners:
            child.kill()
            child.communicate(timeout=10)


def test_a_forked_child_leaves_its_parents_entry_alone(tmp_path: Path) -> None:
    """A child that lets go neither removes the entry nor frees its lock."""
    targets = Targets(tmp_path, "abc", URL)
    targets.keep(0, None)
    child = os.fork()
    if child == 0:
        targets.abandon()
        targets.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    other = Targets(tmp_path, "other", URL)
    other.keep(0, None)
    assert {"abc.json", "abc.lock"} <= listed(tmp_path)
    other.close()
    targets.close()


def test_a_directory_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing raises; one sentence is logged until it works again, and it does then."""
    (tmp_path / DIRECTORY).write_text("in the way")
    targets = Targets(tmp_path, "abc", URL)
    targets.keep(0, None)
    targets.keep(1, None)
    assert [record.getMessage().split(" in ")[0] for record in caplog.records] == [
        "kvobs: the targets for Prometheus"]
    (tmp_path / DIRECTORY).unlink()
    targets.keep(2, None)
    assert (tmp_path / DIRECTORY / "abc.json").exists()
    targets.close()
