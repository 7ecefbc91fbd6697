"""Faults in a real process with a breaker, its board, its store and a real server whose gate follows it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from kvobs.asgi import BreakerMiddleware
from kvobs.breaker import BoardReader
from tests.breaker_watch import Application, Child, Clients, child
from tests.integration.test_asgi_server import serving
from tests.support import ROOT, run_child, wait_until

SECOND = 10**9
ALL, NOTHING = [1, 2, 3], list[int]()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Child]:
    with child(tmp_path) as found:
        yield found


def at_level_3(engine: Child) -> None:
    engine.tell("load", 0.95)
    engine.in_effect(ALL, ALL)


def boards(engine: Child) -> BoardReader:
    return BoardReader(engine.store / "boards")


def alternate(decided: list[dict[str, Any]]) -> bool:
    """Whether every decision begins where the last one of its level ended: none is missing and none is out of order."""
    phase = dict.fromkeys((1, 2, 3), "closed")
    for one in decided:
        if phase[one["level"]] != one["before"]:
            return False
        phase[one["level"]] = one["after"]
    return True


# Two faults at once: the sensor's, another's, what is in effect meanwhile, and what the log says once in the end.
FAULTS: list[tuple[str, tuple[str, Any], list[int], tuple[str, ...]]] = [
    ("raises", ("one", "raises"), NOTHING, ("sample sensor failed", "the action flag1 of one raised")),
    ("silent", ("clock", 86_400), NOTHING, ()),
    ("nan", ("one", "lost"), ALL, ("the actuators of one",)),
    ("negative", ("clock", -86_400), NOTHING, ()),
    ("future", ("board", "cut"), NOTHING, ()),
    ("word", ("board", "gone"), NOTHING, ("what a Blocks says", "metrics failed")),
    ("past", ("board", "garbage"), NOTHING, ()),
]


def test_a_dead_sensor_opens_everything_whatever_else_fails(engine: Child) -> None:
    """Under each of seven dead sensors, with another fault each: levels end, both engines are as before, gates open;
    once it is over level 3 comes back; no decision is missing or in the wrong order, and the log has each fault once.
    """
    gate = boards(engine)

    def stands(level: int) -> bool:
        found = gate.decision()
        return found is not None and found.level == level

    for sensor, (what, how), left, _ in FAULTS:
        if how == "raises":
            engine.tell(what, how)
        engine.tell("load", 0.95)
        engine.in_effect(NOTHING if how == "raises" else ALL, ALL)
        wait_until(lambda: stands(3), 30, "a gate at level 3")
        if what == "board":
            spoil(engine, how)
        else:
            engine.tell(what, how)
        engine.tell("how", sensor)
        engine.in_effect(left, NOTHING)
        wait_until(lambda: stands(0), 30, "an open gate")
        for name, value in (("how", "fine"), ("one", "fine"), ("clock", 0)):
            engine.tell(name, value)
    at_level_3(engine)
    assert list(engine.end()["flags"].values()) == [NOTHING, NOTHING]
    decided = engine.decisions()
    assert alternate(decided)
    assert sum("fails open" in one["reason"] for one in decided) == 3 * len(FAULTS)
    for _, _, _, lines in FAULTS:
        for line in lines:
            assert engine.said(line) == 1, engine.said()
    assert engine.said("Traceback") == 0
    gate.close()


def spoil(engine: Child, how: str) -> None:
    path, = (engine.store / "boards").iterdir()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:77] if how == "cut" else b"\xff" * 1_024)


def test_a_stopped_process_opens_the_gates_and_acts_on_nothing_old(
        engine: Child, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While the engine's process is stopped at level 3 its clients are let in again, which is said once; continued, it
    decides on the load as it is by then. No request is lost or counted twice, and no token.
    """
    monkeypatch.setenv("KVOBS_STORE", str(engine.store))
    application = Application()
    made = BreakerMiddleware(application)
    at_level_3(engine)
    with serving(made) as port, Clients(port) as clients:
        clients.see(503)
        engine.process.send_signal(signal.SIGSTOP)
        engine.order("load", 0.0)  # it is so when the process goes on
        clients.see(200)
        continued = len(engine.decisions())
        engine.process.send_signal(signal.SIGCONT)
        engine.answer()
        engine.in_effect(NOTHING, NOTHING)
        clients.see(200)
        engine.tell("load", 0.95)
        clients.see(503)
        assert engine.state()["hanging"] == 0
    assert clients.lost == []
    assert {answer for answer in clients.answers if answer[1] != 200} == {("sheddable", 503)}
    assert clients.answers["sheddable", 200] > 0
    served = sum(count for (_, status), count in clients.answers.items() if status == 200)
    assert served == application.requests
    assert clients.tokens == application.tokens
    outcomes = {outcome: sum(count for (_, _, what), count in made.counts.items() if what == outcome)
                for outcome in ("admitted", "refused", "full", "late", "gone")}
    assert outcomes == {"admitted": served, "refused": clients.answers["sheddable", 503], "full": 0, "late": 0,
                        "gone": 0}
    assert sum("has not renewed" in record.getMessage() for record in caplog.records) == 1
    engine.end()
    decided = engine.decisions()
    assert alternate(decided)
    for one in decided[continued:]:
        assert dict(one["readings"])["kv_utilization"] in ((0.0,) if one["after"] != "open" else (0.95,))


@pytest.mark.parametrize("hooks", [True, False], ids=["fork of Python", "fork of C"])
def test_a_killed_process_opens_the_gates_and_leaves_its_store(engine: Child, hooks: bool) -> None:
    """After SIGKILL at level 3 gates open at once, though a forked child lives on, and where the child has a copy of
    the board's lock after 3 s; the store can be read and tells the last level; the next process sweeps the board.
    """
    at_level_3(engine)
    gate = boards(engine)
    wait_until(lambda: (found := gate.decision()) is not None and found.level == 3, 30, "a gate at level 3")
    wait_until(lambda: engine.level() == 3, 30, "the level in the store")
    pid = engine.fork(hooks=hooks)
    engine.process.kill()
    engine.process.wait()
    if hooks:
        assert gate.decision() is None
    wait_until(lambda: gate.decision() is None, 30, "an open gate")
    os.kill(pid, 0)  # the child is still there
    assert engine.level() == 3
    assert ("(ended)" in plain("status", engine)) == hooks  # a copy of the store's lock counts as a life, too
    decided = engine.decisions()
    assert [(one["level"], one["after"]) for one in decided] == [(1, "open"), (2, "open"), (3, "open")]
    assert sorted((one["actuator"], one["level"], one["done"]) for one in engine.actions()) == [
        (name, level, True) for name in ("one", "two") for level in ALL]
    assert engine.said("Traceback") == 0
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text(), 30, "an end")
    with child(engine.directory / "next", store=engine.store) as other:
        other.tell("load", 0.0)
        wait_until(lambda: (found := gate.decision()) is not None and found.level == 0, 30, "the next one's board")
        assert len(list((engine.store / "boards").iterdir())) == 1
        other.end()
    gate.close()


def plain(word: str, engine: Child) -> str:
    return run_child([sys.executable, "-m", "kvobs", "breaker", word, engine.store], cwd=ROOT).stdout
