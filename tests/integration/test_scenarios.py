"""Each scenario in a process of its own: what it says is checked against the store and the metrics page."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")

from kvobs.lab.scenarios import SCENARIOS, run
from kvobs.model import CacheGone
from kvobs.store import Point, StoreReader
from tests.support import ROOT, child_environment, wait_until
from tests.vgpu import needs_vgpu

pytestmark = [pytest.mark.torch, needs_vgpu()]
MIB = 1 << 20


class Ran:
    """What a scenario printed, and what it left in its store."""

    def __init__(self, told: dict[str, Any], reader: StoreReader) -> None:
        self.told, self.reader = told, reader

    def said(self, name: str) -> Any:
        found, = [claim["said"] for claim in self.told["claims"] if claim["name"] == name]
        return found

    def last(self, metric: str) -> list[Point]:
        points = self.reader.points(metric)
        return [point for point in points if point.wall_ns == points[-1].wall_ns]

    def verdict(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.reader.flights()[0].record.snapshot)["verdict"]
        return found


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def play(name: str) -> Ran:
        store = tmp_path_factory.mktemp(name) / "store"
        done = subprocess.run([sys.executable, "-m", "kvobs", "demo", "--scenario", name, "--json"], cwd=ROOT,
                              env=child_environment(KVOBS_STORE=str(store), KVOBS_PROMETHEUS="off"), timeout=600,
                              capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr
        return Ran(json.loads(done.stdout), StoreReader(store))
    return play


@pytest.mark.parametrize("name", SCENARIOS)
def test_kvobs_tells_the_truth(name: str, played: Any) -> None:
    """Every expectation of the registry is told, in its order, and agrees."""
    ran = played(name)
    assert ran.told["agree"] is True
    assert [(claim["name"], claim["truth"], claim["agrees"]) for claim in ran.told["claims"]] == [
        (one.name, one.value, True) for one in SCENARIOS[name].truth.expected]


def test_fragmentation_is_what_the_flight_record_holds(played: Any) -> None:
    """The request of 24 MiB failed although six sessions' 96 MiB are free: FRAGMENTED, and pinned."""
    ran = played("fragmentation")
    record, verdict = ran.reader.flights()[0].record, ran.verdict()
    assert (record.device, record.requested_bytes, verdict["verdict"]) == ("vgpu:0", 24 * MIB, "FRAGMENTED")
    evidence = verdict["evidence"]
    # What is alive of the device's 232 MiB: four sessions of 16, two buffers of 24, and below 4 MiB of weights.
    assert 0 <= 232 * MIB - (4 * 16 + 2 * 24) * MIB - evidence["sum_bytes"] < 4 * MIB
    assert evidence["largest_free_bytes"] == 16 * MIB
    assert evidence["device_free_bytes"] < 24 * MIB
    assert len(evidence["pins"]) >= 8


def test_with_the_advice_the_last_session_has_its_turn(played: Any) -> None:
    """The store tells two attempts of the last session, one out of memory, then one that ended well."""
    outcomes = [stored.record.outcome for stored in played("fragmentation").reader.turns(session="long")]
    assert outcomes == ["out_of_memory", "ok"]


def test_oom_is_what_the_flight_record_holds(played: Any) -> None:
    """Of 206 MiB, 192 are held, so that 16 cannot be had wherever the rest lies; both attempts failed."""
    ran = played("oom")
    record, verdict = ran.reader.flights()[0].record, ran.verdict()
    assert (record.device, record.requested_bytes, verdict["verdict"]) == ("vgpu:0", 16 * MIB, "CAPACITY")
    assert verdict["evidence"]["sum_bytes"] <= 206 * MIB - 3 * 64 * MIB
    assert verdict["evidence"]["shortfall_bytes"] == 16 * MIB - verdict["evidence"]["sum_bytes"]
    assert [stored.record.outcome for stored in ran.reader.turns(session="session 3")] == ["out_of_memory"] * 2
    assert [int(point.value) for point in ran.last("kvobs.allocator.out_of_memory")] == [2]


def test_migration_is_what_the_metrics_hold(played: Any) -> None:
    """Of three moves at 11, 23 and 35 tokens, each pair of devices has its buffers and bytes, as have the copies."""
    ran = played("migration")
    per_token = 2 * 2 * 8 * 64 * 4  # K and V of two layers, eight heads of 64 float32 numbers
    truth = {("vgpu:0", "vgpu:1"): (8, per_token * (11 + 35)), ("vgpu:1", "vgpu:0"): (4, per_token * 23)}
    for kind in ("migration", "device.copy"):
        counts, sizes = (
            {(point.attributes["src"], point.attributes["dst"]): int(point.value)
             for point in ran.last(f"kvobs.{kind}.{what}")} for what in ("operations", "io"))
        assert {pair: (counts[pair], sizes[pair]) for pair in truth} == truth
    stored = [stored.record for stored in ran.reader.migrations()]
    for (src, dst), (buffers, size) in truth.items():
        moves = [move for move in stored if (move.src, move.dst) == (src, dst)]
        assert (sum(move.buffers for move in moves), sum(move.bytes for move in moves)) == (buffers, size)
    # Each session lies wholly on one device: the traveller where its last turn was.
    assert {point.attributes["device"]: int(point.value) for point in ran.last("kvobs.kv.usage")
            if point.attributes["state"] == "held"} == {"vgpu:0": per_token * 47, "vgpu:1": per_token * 47}


def test_leak_is_what_the_store_holds(played: Any) -> None:
    """Held bytes grow by one session's with each that leaks, in steps, while the others' caches are told as freed."""
    ran = played("leak")
    one = 2 * 2 * 8 * 64 * 4 * 35  # three turns of 8 + 4 tokens, less the last one
    turns = [stored.record for stored in ran.reader.turns()]
    assert {turn.session for turn in turns if turn.turn == 3 and turn.kv_bytes == one} == {
        f"{kind} {number}" for kind in ("leaked", "clean") for number in range(4)}
    gone = {stored.record.cache_id for stored in ran.reader.events() if isinstance(stored.record, CacheGone)}
    assert gone == {turn.cache_id for turn in turns if turn.session.startswith("clean ")}
    held = [int(point.value) for point in ran.reader.points("kvobs.kv.usage") if point.attributes["state"] == "held"]
    assert len(turns) == 8 * 3
    assert held[-1] == 4 * one
    assert {one, 2 * one, 3 * one, 4 * one} <= set(held)


def test_a_scenario_that_is_not_known_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence names those that there are, and the exit code is 2."""
    assert run("storm") == 2
    assert capfd.readouterr().err == (
        "kvobs: There is no scenario 'storm'; there are fragmentation, oom, migration, leak.\n")


def test_held_it_goes_on_serving_metrics(tmp_path: Path) -> None:
    """With --hold the leaked caches are on the metrics page after the scenario has told all, until an interrupt."""
    output = tmp_path / "out"
    with output.open("wb") as out, subprocess.Popen(
            [sys.executable, "-c", "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
             "from kvobs.cli import main; sys.exit(main(sys.argv[1:]))",
             "demo", "--scenario", "leak", "--json", "--hold", "600"], cwd=ROOT, stdout=out,
            stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            env=child_environment(XDG_STATE_HOME=str(tmp_path), KVOBS_PROMETHEUS="127.0.0.1:0")) as child:
        try:
            wait_until(lambda: output.read_text().endswith("\n"), 300, "the scenario's answer")
            told = json.loads(output.read_text())
            with urllib.request.urlopen(told["metrics"], timeout=30) as page:
                lines = page.read().decode().splitlines()
            caches = [line for line in lines if line.startswith("kvobs_kv_caches{")]
            assert [float(line.rsplit(" ", 1)[1]) for line in caches] == [4]
            child.send_signal(2)
            assert child.wait(60) == 0
        finally:
            child.kill()
