"""More faults in a real process with a breaker: actions that hang, disks that refuse, policies that change."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvobs.breaker import BoardReader
from tests.breaker_watch import Child, child, policy
from tests.support import wait_until

ALL, NOTHING = [1, 2, 3], list[int]()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Child]:
    with child(tmp_path) as found:
        yield found


def sees(gate: BoardReader, level: int) -> None:
    """Wait until a gate sees this level."""
    wait_until(lambda: (found := gate.decision()) is not None and found.level == level, 60, f"a gate at level {level}")


def test_an_action_that_hangs_holds_up_no_other_thread_and_no_other_engine(engine: Child) -> None:
    """While an action hangs far beyond its limit on one thread of an engine, the other thread steps on, and the other
    engine has its orders done and undone twice; once it ends, late, what it did is undone, and every order has exactly
    one answer.
    """
    engine.tell("one", "hangs")
    engine.tell("load", 0.95)
    engine.in_effect([1], ALL)
    assert engine.state()["hanging"] == 1
    before = engine.state()["steps"]["one"]
    for load, two in ((0.0, NOTHING), (0.95, ALL), (0.0, NOTHING)):
        engine.tell("load", load)
        engine.in_effect([1], two)
    after = engine.state()["steps"]["one"]
    stepped = sorted(late - early for early, late in zip(before, after, strict=True))
    assert stepped[0] == 0
    assert stepped[1] > 100
    engine.tell("one", "fine")
    engine.tell("release")
    engine.in_effect(NOTHING, NOTHING)
    engine.tell("load", 0.95)
    engine.in_effect(ALL, ALL)
    assert list(engine.end()["flags"].values()) == [NOTHING, NOTHING]
    answers = engine.actions()
    ordered = Counter((one["level"], one["generation"], one["undo"]) for one in answers if one["actuator"] == "two")
    assert Counter((one["level"], one["generation"], one["undo"]) for one in answers
                   if one["actuator"] == "one") == ordered
    assert set(ordered.values()) == {1}
    late = [(one["actuator"], one["level"], one["undo"]) for one in answers if one["late"] and not one["undo"]]
    assert late == [("one", 1, False)]
    outdated = [one for one in answers if one["actuator"] == "one" and not one["done"]]
    assert outdated
    assert all("newer decision" in one["reason"] or "deadline had passed" in one["reason"] for one in outdated)
    assert all(one["done"] for one in answers if one["actuator"] == "two")


def test_a_policy_that_changes_under_fire(engine: Child) -> None:
    """At level 3 a policy file that becomes garbage, or goes, leaves everything as it is, and is refused once each;
    one that asks for more undoes everything, one that asks for less does it again.
    """
    gate = BoardReader(engine.store / "boards")
    engine.tell("load", 0.95)
    engine.in_effect(ALL, ALL)
    engine.policy.write_bytes(b"[[level\xff")
    wait_until(lambda: engine.said("keeps the policy") == 1, 30, "a refusal")
    engine.policy.unlink()
    wait_until(lambda: engine.said("keeps the policy") == 2, 30, "a second refusal")
    sees(gate, 3)
    assert engine.flags() == [ALL, ALL]
    engine.policy.write_text(policy(0.96, 0.97, 0.98))
    engine.in_effect(NOTHING, NOTHING)
    sees(gate, 0)
    engine.policy.write_text(policy(0.5, 0.7, 0.9))
    engine.in_effect(ALL, ALL)
    sees(gate, 3)
    assert list(engine.end()["flags"].values()) == [NOTHING, NOTHING]
    assert engine.said("keeps the policy") == 2
    assert engine.said("reloaded from its file") == 2
    gate.close()


def test_a_board_without_a_place_leaves_gates_open_and_actions_right(engine: Child) -> None:
    """Where the directory of boards becomes a file, the gate opens within 3 s and that is said once; actions are done
    and undone as before, and once there is a place again the gate sees the level.
    """
    gate = BoardReader(engine.store / "boards")
    engine.tell("load", 0.95)
    engine.in_effect(ALL, ALL)
    sees(gate, 3)
    shutil.rmtree(engine.store / "boards")
    (engine.store / "boards").write_text("no directory")
    wait_until(lambda: gate.decision() is None, 30, "an open gate")
    for load, levels in ((0.0, NOTHING), (0.95, ALL)):
        engine.tell("load", load)
        engine.in_effect(levels, levels)
        assert gate.decision() is None
    (engine.store / "boards").unlink()
    sees(gate, 3)
    engine.end()
    assert engine.said("the decision board cannot be written") == 1
    assert gate.decision() is None
    gate.close()


def test_a_limit_on_files_costs_no_action(engine: Child) -> None:
    """While the process may write no byte to a file (RLIMIT_FSIZE), gates open, actions are done and undone;
    with the limit gone gates and store tell the level.
    """
    gate = BoardReader(engine.store / "boards")
    engine.tell("load", 0.95)
    engine.in_effect(ALL, ALL)
    sees(gate, 3)
    engine.tell("files", 0)
    wait_until(lambda: gate.decision() is None, 30, "an open gate")
    for load, levels in ((0.0, NOTHING), (0.95, ALL)):
        engine.tell("load", load)
        engine.in_effect(levels, levels)
    engine.tell("files", -1)
    sees(gate, 3)
    wait_until(lambda: engine.level() == 3, 60, "the level in the store")
    engine.end()
    gate.close()


def test_a_full_disk_costs_no_action(tmp_path: Path) -> None:
    """With store and boards on a disk that is full from the beginning, actions are done and undone and gates are open;
    with room, gates see the level; each trouble is said once.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True,
                          text=True, check=False) if shutil.which("mount") else None
    if made is None or made.returncode:
        pytest.skip("A small file system cannot be mounted here.")
    try:
        (disk / "store").mkdir()
        fill(disk / "ballast")
        with (child(tmp_path / "engine", store=disk / "store") as engine,
              contextlib.closing(BoardReader(engine.store / "boards")) as gate):
            for load, levels in ((0.95, ALL), (0.0, NOTHING), (0.95, ALL)):
                engine.tell("load", load)
                engine.in_effect(levels, levels)
                assert gate.decision() is None
            (disk / "ballast").unlink()
            subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
            sees(gate, 3)
            wait_until(lambda: list((disk / "store").glob("*.sqlite")), 60, "a store")
            wait_until(lambda: engine.level() == 3, 60, "the level in the store")
            engine.end()
            for trouble in ("decision board cannot be written", "the store in "):
                assert engine.said(trouble) == 1, engine.said()
            assert engine.said("Traceback") == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(path: Path) -> None:
    """Write a file until there is no room for more."""
    with open(path, "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 4_096)
