"""Faults that reach the breaker: bad sensors, bad files, bad actuators; each is survived, and said once."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs import model
from kvobs.breaker import BoardReader, BoardWriter, Breaker, Command, Leaf, Level, Limits, Policy, Protection, Reading
from kvobs.breaker import _commands as commands
from kvobs.breaker._conditions import usable
from kvobs.breaker._gate import ACT, Decision
from kvobs.breaker._sense import Senses
from kvobs.config import Config
from kvobs.metrics import Metrics
from kvobs.runtime import Runtime
from kvobs.sources._safe_point import Action, Result, SafePoint
from tests import events

SECOND = 10**9
POLICY = Policy(name="load", jitter=0.0, escalate_s=1.0, levels=tuple(
    Level(condition=Leaf(signal="app.load", above=float(limit))) for limit in (1, 2, 3)))


class Clock:
    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def policy_in(directory: Path) -> str:
    (directory / "policy.toml").write_text("\n".join(['name = "load"', 'escalate = "1s"', *(
        f'[[level]]\nany = [{{ signal = "app.load", above = {limit} }}]' for limit in (1, 2, 3))]))
    return str(directory / "policy.toml")


def decision(generation: int, level: int = 3) -> Decision:
    limits = (Limits(), Limits(), Limits(admit=level < 3))
    return Decision(generation=generation, level=level, mode=ACT, limits=limits, retry_after_s=1.0,
                    expires_ns=2 * SECOND)


# -- sensors ---------------------------------------------------------------------------------------------


@given(age=st.integers(-10**12, 10**12), value=st.floats(allow_nan=True, allow_infinity=True))
def test_only_fresh_finite_readings_are_judged(age: int, value: float) -> None:
    """A reading is judged where it is finite and no more than its 10 s away from now, before or after."""
    why = usable(Leaf(signal="a", above=1.0), Reading(value, 10**15 - age), 10**15)
    assert (not why) == (math.isfinite(value) and abs(age) <= 10 * SECOND)


def test_a_level_of_a_signal_from_the_future_ends() -> None:
    """Readings that are hours ahead open nothing, and a level that was open when they began closes at the next step."""
    breaker, told = Breaker(POLICY, ACT, list), list[model.Decided]()
    for second in range(1, 9):
        ahead = 3_600 if second < 3 or second > 5 else 0
        breaker.report("app.load", 1.5, (second + ahead) * SECOND)
        told += breaker.tick(second * SECOND, [])
    assert [(one.t_ns // SECOND, one.after) for one in told] == [(3, "open"), (6, "closed")]
    assert told[1].reason == ("Level 1 (reorganise) is closed: fails open: app.load is 3600.0 s ahead of time.")


@pytest.mark.parametrize("free", [-5.0, math.nan, -math.inf, "full", None])
def test_free_bytes_that_are_no_amount_are_no_reading(free: Any) -> None:
    """A driver that tells negative or no numbers leaves the last word, which grows old, and the others' word."""
    senses = Senses()
    senses.fold([model.Poll(SECOND, "nvml", 1, (("kvobs.device.memory", ("cuda:0", "free"), 60.0),)),
                 model.AllocatorState(SECOND, "cuda:0", 40, 30, None)])
    senses.fold([model.Poll(9 * SECOND, "nvml", 1, (("kvobs.device.memory", ("cuda:0", "free"), free),)),
                 model.AllocatorState(9 * SECOND, "cuda:0", 40, 30, None), events.blocks(t_ns=9 * SECOND)])
    found = senses.signals(9 * SECOND, [])
    assert found["cuda:0"]["headroom"] == Reading(0.7, SECOND)
    assert found["tiny@cpu"]["kv_utilization"].t_ns == 9 * SECOND


@pytest.mark.parametrize(("used", "free"), [(-3, 11), (20, -19), (math.nan, 11)])
def test_a_share_outside_of_0_to_1_is_no_reading(used: Any, free: int) -> None:
    """Blocks in use that are negative, more than there are, or no number leave the last share, which grows old."""
    senses = Senses()
    senses.fold([events.blocks(t_ns=SECOND), events.blocks(t_ns=9 * SECOND, used=used, free=free)])
    assert senses.signals(9 * SECOND, [])["tiny@cpu"]["kv_utilization"] == Reading(3 / 16, SECOND)


def test_a_bad_event_is_said_once_and_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """Of a batch with an event that nobody can read, all the others count; the log has one line, however often."""
    broken = model.Poll(SECOND, "nvml", 1, (("kvobs.device.memory", ("cuda:0",), 1.0),))
    breaker = Breaker(POLICY, ACT, list)
    for second in range(1, 5):
        breaker.report("app.load", 1.5, second * SECOND)
        breaker.follow(second * SECOND, [broken, events.blocks(t_ns=second * SECOND)], [])
    assert breaker.levels() == {"tiny@cpu": 1}
    assert sum("what a Poll says" in record.getMessage() for record in caplog.records) == 1


def test_errors_and_rates_outlive_a_stamp_of_the_future() -> None:
    """An error and a count from the next day are no errors of the last minute, and the rate after them is right."""
    senses, day = Senses(), 86_400
    senses.fold([model.OutOfMemory(day * SECOND, None, "", ""), events.blocks(t_ns=day * SECOND, preemptions=0)])
    senses.fold([events.blocks(t_ns=second * SECOND, preemptions=2 * second) for second in range(100, 121)])
    found = senses.signals(120 * SECOND, [])["tiny@cpu"]
    assert found["out_of_memory"].value == 0.0
    assert found["preemption_rate"] == Reading(2.0, 120 * SECOND)


def test_a_sensor_that_raises_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """A source whose sample always raises costs one line in the log, and the other source is heard each time."""
    heard: list[int] = []

    def sample(now_ns: int) -> list[model.Event]:
        heard.append(now_ns)
        return []

    dead, sound = Source("dead", lambda now: 1 // 0), Source("sound", sample)
    runtime = Runtime(Config(store=None, prometheus=None, otlp="off", breaker="act"), [dead, sound])
    runtime.start()
    try:
        for _ in range(5):
            runtime.tick(sample=True)
    finally:
        runtime.stop()
    assert len(heard) >= 5
    assert sum("sample dead failed" in record.getMessage() for record in caplog.records) == 1


def test_a_bad_event_costs_no_other_one_its_metric() -> None:
    """Where one event of a batch cannot be counted, those before and after it are, and it is an error."""
    metrics = Metrics()
    bad: Any = object()
    with pytest.raises(KeyError):
        metrics.fold([model.Allocation(7, "cuda:0", 1, 1), bad, model.Allocation(7, "cuda:0", 1, 1)])
    points = {row.name: values for row, values in metrics.collect()}
    assert list(points["kvobs.self.events"].values()) == [2]


def test_a_source_without_actuators_costs_the_others_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where one source's actuators cannot be had, the next source's are ordered, and the log has one line for it."""
    orders: list[int] = []

    class Lost:
        name = "lost"

        @property
        def actuators(self) -> Any:
            raise OSError("gone")

    class Sound:
        name = "sound"

        @property
        def actuators(self) -> Any:
            return [self]

        def capabilities(self) -> list[model.Capability]:
            return [model.Capability(level, f"do{level}", True, "Do.") for level in (1, 2, 3)]

        def submit(self, order: model.Order) -> None:
            orders.append(order.level)

    sources: list[Any] = [Lost(), Sound()]
    protection = Protection(Config(store=None, breaker="act", breaker_policy=policy_in(tmp_path)), "one", Metrics(),
                            lambda: sources)
    for second in range(1, 6):
        protection.report("app.load", 9.0, second * SECOND)
        protection.follow(second * SECOND, [], [], True)
    assert orders == [1, 2, 3]
    assert sum("the actuators of lost" in record.getMessage() for record in caplog.records) == 1
    protection.stop(6 * SECOND)
    assert orders == [1, 2, 3, 3, 2, 1]


class Source:
    """A source with nothing but a sample."""

    def __init__(self, name: str, sample: Any) -> None:
        self.name, self.sample = name, sample

    def install(self, emit: Any) -> None:
        pass

    def uninstall(self) -> None:
        pass

    def availability(self) -> list[model.Availability]:
        return []


# -- actuators -------------------------------------------------------------------------------------------


def test_actuators_that_cannot_be_had_cost_no_decision(caplog: pytest.LogCaptureFixture) -> None:
    """Where asking for the actuators raises, decisions are told all the same, and the log has one line for it."""

    def lost() -> Sequence[model.Actuator]:
        raise RuntimeError("gone")

    breaker, told = Breaker(POLICY, ACT, lost), list[model.Decided]()
    for second in range(1, 6):
        breaker.report("app.load", 9.0, second * SECOND)
        told += breaker.tick(second * SECOND, [])
    assert [one.level for one in told] == [1, 2, 3]
    assert sum("the actuators failed" in record.getMessage() for record in caplog.records) == 1


def test_a_process_that_is_forked_within_an_action_can_undo_it() -> None:
    """A child of a fork that another thread made while an action was half done has it undone at its end; the parent's
    goes on, and counts as in effect only where it was done.
    """
    state: set[str] = set()
    began, go_on, done = threading.Event(), threading.Event(), True

    def carry_out(_: int) -> Result:
        state.add("half")
        began.set()
        go_on.wait(30)
        return Result(done)

    def undo(_: int) -> Result:
        state.clear()
        return Result(True)

    point = SafePoint("engine", [Action(model.Capability(1, "act", True, "Act."), lambda: model.Effect(0, None),
                                        carry_out, undo)], lambda event: None)
    for number, done in enumerate((True, False), 1):
        began.clear()
        go_on.clear()
        point.submit(model.Order(1, "act", 2 * number, 1 << 62))
        engine = threading.Thread(target=point.run)
        engine.start()
        assert began.wait(30)
        child = os.fork()
        if child == 0:
            point.after_fork_in_child()
            point.close()
            os._exit(len(state))
        go_on.set()
        engine.join()
        assert os.waitpid(child, 0)[1] == 0
        assert point.in_effect() == (("act",) if done else ())
        point.submit(model.Order(1, "act", 2 * number + 1, 1 << 62, True))
        point.run()
        assert point.in_effect() == ()
    point.close()


# -- commands --------------------------------------------------------------------------------------------


def test_files_that_are_no_commands_do_not_stand_in_the_way(tmp_path: Path) -> None:
    """Garbage, deep nesting, too much, a pipe, an endless link and a folder: none raises or blocks, those that can be
    removed are, and the one command among them is obeyed once.
    """
    folder = tmp_path / commands.FOLDER
    commands.send(tmp_path, "one", Command("hold", 2))
    (folder / "one-0").write_bytes(b"\xff\x00")
    (folder / "one-1").write_bytes(b"[" * 1_024)
    (folder / "one-2").write_bytes(b'{"what":' * 128)
    (folder / "one-3").write_bytes(b'{"what": "reset"' + b" " * 1_024 + b"}")
    os.mkfifo(folder / "one-4")
    (folder / "one-5").symlink_to("/dev/zero")
    (folder / "one-6").mkdir()
    (folder / "one-7").write_bytes(b'{"what": "hold", "level": "2"}')
    assert commands.take(tmp_path, "one") == [Command("hold", 2)]
    assert [path.name for path in folder.iterdir()] == ["one-6"]
    assert commands.take(tmp_path, "one") == []


def test_a_command_that_cannot_be_removed_is_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be obeyed again each second."""
    commands.send(tmp_path, "one", Command("reset"))

    def read_only(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    assert commands.take(tmp_path, "one") == commands.take(tmp_path, "one") == []


def test_commands_keep_their_order_when_the_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two commands the one that was given last is taken last, though the wall clock went back an hour between."""
    commands.send(tmp_path, "one", Command("hold", 2))
    earlier = time.time_ns() - 3_600 * SECOND
    monkeypatch.setattr(time, "time_ns", lambda: earlier)
    monkeypatch.setattr(time, "time", lambda: earlier / SECOND)
    commands.send(tmp_path, "one", Command("hold", None))
    assert commands.take(tmp_path, "one") == [Command("hold", 2), Command("hold", None)]


# -- the board -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["file", "directory", "replaced"])
def test_a_board_that_was_removed_is_made_again(fault: str, tmp_path: Path) -> None:
    """After the file or its directory went, or something was put in its place, new readers see the next decision."""
    folder = tmp_path / "boards"
    writer = BoardWriter(folder, "one", lambda: 0)
    writer.publish(decision(1))
    before = BoardReader(folder)
    assert before.decision() is not None
    writer.path.unlink()
    if fault == "directory":
        folder.rmdir()
    if fault == "replaced":
        writer.path.write_bytes(b"x" * 2_000)
    writer.publish(decision(2))
    reader = BoardReader(folder)
    found = reader.decision()
    assert found is not None
    assert found.generation == 2
    assert before.decision() is None  # it has let go of the old file, and will find the new one
    writer.close()
    assert list(folder.iterdir()) == []
    assert reader.decision() is None


def test_a_gate_says_once_that_its_breaker_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When a decision that limits somebody is not renewed, one line says that requests pass; again the next time, and
    never where nobody was limited.
    """
    clock, writer = Clock(), BoardWriter(tmp_path, "one", lambda: 0)
    reader = BoardReader(tmp_path, clock=clock)
    lines = []
    for level in (3, 3, 0):
        writer.publish(decision(1, level))
        for _ in range(6):
            reader.decision()
            clock.now_ns += SECOND
        lines.append(sum("has not renewed" in record.getMessage() for record in caplog.records))
    assert lines == [1, 2, 2]
    writer.close()


def test_a_decision_is_as_old_as_it_is(tmp_path: Path) -> None:
    """Where the process was stopped for 10 s between deciding and publishing, no gate takes the decision for new."""
    clock = Clock(SECOND)
    protection = Protection(Config(store=tmp_path, breaker="act", breaker_policy=policy_in(tmp_path)), "one",
                            Metrics(), list, clock)
    reader = BoardReader(tmp_path / "boards")
    try:
        for _ in range(5):
            protection.report("app.load", 9.0, clock.now_ns)
            protection.follow(clock.now_ns, [], [], True)
            clock.now_ns += SECOND
        assert reader.decision() is not None
        seen = clock.now_ns
        clock.now_ns += 10 * SECOND
        protection.follow(seen, [], [], True)
        assert reader.decision() is None
        protection.follow(clock.now_ns, [], [], True)
        assert reader.decision() is not None
    finally:
        protection.stop(clock.now_ns)


def test_a_process_that_is_looked_at_seldom_renews_its_decision(tmp_path: Path) -> None:
    """Between two looks that are 4 s apart gates see the decision all the time."""
    clock = Clock(SECOND)
    protection = Protection(Config(store=tmp_path, breaker="act"), "one", Metrics(), list, clock)
    reader = BoardReader(tmp_path / "boards", clock=clock)
    try:
        for quarter in range(40):
            protection.follow(clock.now_ns, [], [], quarter % 16 == 0)
            assert reader.decision() is not None
            clock.now_ns += SECOND // 4
    finally:
        protection.stop(clock.now_ns)
        reader.close()
