"""Any faults in any order, alone and together: nothing is lost, the state is right once they end, each is said once."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobs import model
from kvobs.breaker import BoardReader, Command, Phase, Protection, send
from kvobs.breaker._protection import HOLDS_NS
from kvobs.config import Config
from kvobs.metrics import Metrics
from kvobs.sources._safe_point import Action, Result, SafePoint

SECOND = 10**9
LEVELS = (1, 2, 3)
POLICY = "\n".join(['name = "load"', 'escalate = "1s"', "jitter = 0", "transitions = 1000", *(f"""
[[level]]
any = [{{ signal = "app.load", above = {level}, max_age = "2s" }}]
open = "1s"
closed = "1s"
longest_open = "2s"
half_open = "1s"
""" for level in LEVELS)])
FINE, RAISES, HANGS = "fine", "raises", "hangs"


class Hands:
    """One engine's actuator: a flag per level, set by an action that can be undone; it keeps what it was ordered."""

    def __init__(self, name: str, machine: Faults) -> None:
        self.name, self.machine = name, machine
        self.flags: set[int] = set()
        self.how = FINE
        self.deaf = self.missed = False  # submit raises, and has
        self.orders: list[model.Order] = []
        self.answers: list[model.ActionTaken] = []
        self.stuck: set[int] = set()  # flags whose undoing raised
        self.point = SafePoint(name, [self._action(level) for level in LEVELS], self._told, lambda: machine.now)

    def _told(self, event: model.Event) -> None:
        assert isinstance(event, model.ActionTaken)
        self.answers.append(event)
        self.machine.events.append(event)

    def _action(self, level: int) -> Action:
        def fault() -> None:
            if self.how == HANGS:
                self.machine.now += 20 * SECOND
            if self.how == RAISES:
                raise OSError("half way")

        def carry_out(_: int) -> Result:
            self.flags.add(level)
            fault()
            return Result(True)

        def undo(_: int) -> Result:
            if f"flag{level}" in self.point.in_effect():  # else it is rolled back, which has no fault of its own here
                self.stuck.add(level)
                fault()
            self.stuck.discard(level)
            self.flags.discard(level)
            return Result(True)

        return Action(model.Capability(level, f"flag{level}", True, "Set a flag."), lambda: model.Effect(0, None),
                      carry_out, undo)

    def capabilities(self) -> Sequence[model.Capability]:
        return self.point.capabilities()

    def plan(self, kind: str) -> model.Effect:
        return self.point.plan(kind)

    def submit(self, order: model.Order) -> None:
        if self.deaf:
            self.missed = True
            raise RuntimeError("deaf")
        self.orders.append(order)
        self.point.submit(order)


class Lines(logging.Handler):
    """What was logged, counted."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        self.counts[record.getMessage()] += 1


class Faults(RuleBasedStateMachine):
    """A breaker with two engines, a board, an operator, and a gate in what might be another process."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000 * SECOND
        self.directory = Path(tempfile.mkdtemp())
        (self.directory / "policy.toml").write_text(POLICY)
        self.events: list[model.Event] = []
        self.decided: list[model.Decided] = []
        self.load, self.sensor, self.shift, self.reaching = 0.0, True, 0, True
        self.hands = (Hands("one", self), Hands("two", self))
        self.protection = Protection(
            Config(store=self.directory, breaker="act", breaker_policy=str(self.directory / "policy.toml")), "engine",
            Metrics(), lambda: [SimpleNamespace(actuators=self.hands)], lambda: self.now)
        self.published: list[tuple[int, int, int]] = []  # when, level, generation: what gates may have seen
        self.seen: dict[int, int] = {}  # when the gate first saw what was published at a time
        self.fresh = False  # the last tick's board is undamaged
        self.gate = BoardReader(self.boards, clock=lambda: self.now)
        self.log = logging.getLogger("kvobs")
        self.lines = Lines()
        self.log.addHandler(self.lines)
        self.propagated, self.log.propagate = self.log.propagate, False
        self.tick()

    @property
    def boards(self) -> Path:
        return self.directory / "boards"

    def tick(self, seconds: int = 1) -> None:
        """A second goes by: the sensor tells, the breaker decides, the engines reach their safe points."""
        for _ in range(seconds):
            self.now += SECOND
            if self.sensor:
                self.protection.report("app.load", self.load, self.now + self.shift)
            events, self.events = self.events, []
            before = len(events)
            self.protection.follow(self.now, events, [], True)
            self.decided += [one for one in events[before:] if isinstance(one, model.Decided)]
            breaker = self.protection.breaker
            assert breaker is not None
            halves = [one for one in breaker.states().values() if one.levels[2].phase is Phase.HALF_OPEN]
            level = 3 if halves else max(breaker.levels().values(), default=0)  # on probation its limits stay
            self.published.append((self.now, level, breaker.decisions))
            self.fresh = self.boards.is_dir()
            if self.reaching:
                for hands in self.hands:
                    hands.point.run()

    # -- what goes on ----------------------------------------------------------------------------------

    @rule(load=st.sampled_from([0.0, 1.5, 2.5, 9.0, -1.0, float("nan"), float("inf"), float("-inf")]),
          seconds=st.integers(0, 6))
    def load_changes(self, load: float, seconds: int) -> None:
        self.load = load
        self.tick(seconds)

    @rule(seconds=st.integers(1, 8))
    def time_passes(self, seconds: int) -> None:
        self.tick(seconds)

    @rule(what=st.sampled_from([Command("hold", 0), Command("hold", 2), Command("hold", 3), Command("hold"),
                                Command("reset"), Command("nonsense"), Command("hold", 9)]))
    def an_operator_speaks(self, what: Command) -> None:
        send(self.directory, "engine", what)
        self.tick()

    # -- faults ----------------------------------------------------------------------------------------

    @rule(sensor=st.booleans(), shift=st.sampled_from([0, 3_600 * SECOND, -3_600 * SECOND]))
    def the_sensor(self, sensor: bool, shift: int) -> None:
        self.sensor, self.shift = sensor, shift

    @rule(which=st.integers(0, 1), how=st.sampled_from([FINE, RAISES, HANGS]), deaf=st.booleans())
    def an_actuator(self, which: int, how: str, deaf: bool) -> None:
        self.hands[which].how, self.hands[which].deaf = how, deaf

    @rule(reaching=st.booleans())
    def the_engines_rest(self, reaching: bool) -> None:
        self.reaching = reaching

    @rule(seconds=st.integers(3, 60))
    def the_process_is_stopped(self, seconds: int) -> None:
        self.now += seconds * SECOND

    @precondition(lambda self: self.fresh)
    @rule(how=st.sampled_from(["cut", "garbage", "gone", "file in its place", "all gone", "read by nobody"]))
    def the_board(self, how: str) -> None:
        path = self.boards / "engine.board"
        if how == "cut":
            path.write_bytes(path.read_bytes()[:100])
        elif how == "garbage":
            path.write_bytes(b"\xff" * 1_024)
        elif how == "gone":
            path.unlink()
        elif how != "read by nobody":
            shutil.rmtree(self.boards)
            if how == "file in its place":
                self.boards.write_text("no directory")
        self.fresh = how == "read by nobody"

    @rule()
    def the_board_s_place_is_free_again(self) -> None:
        if self.boards.is_file():
            self.boards.unlink()

    @rule(name=st.sampled_from(["engine-0", "engine-9"]),
          data=st.sampled_from([b"", b"[" * 1_000, b'{"what": 3}', b"\xff", b"x" * 5_000]))
    def somebody_leaves_rubbish(self, name: str, data: bytes) -> None:
        folder = self.directory / "breaker-commands"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    # -- what always holds -----------------------------------------------------------------------------

    @invariant()
    def a_gate_sees_what_was_decided_or_is_open(self) -> None:
        """Never a decision that was not made, none for longer than 3 s after it was first seen; the newest there is."""
        found = self.gate.decision()
        if found is not None:
            when = [at for at, level, generation in self.published if (level, generation) == (
                found.level, found.generation)]
            assert when
            assert self.now - self.seen.setdefault(when[-1], self.now) < HOLDS_NS
            if self.fresh:
                assert (found.level, found.generation) == self.published[-1][1:]

    @invariant()
    def every_decision_is_told(self) -> None:
        assert self.protection.breaker is not None
        assert len(self.decided) == self.protection.breaker.decisions
        for one in self.decided:
            assert one.reason.endswith(".")

    @invariant()
    def orders_are_answered_once_in_their_order(self) -> None:
        for hands in self.hands:
            assert [(one.kind, one.generation, one.undo) for one in hands.answers] == [
                (one.kind, one.generation, one.undo) for one in hands.orders[:len(hands.answers)]]

    @invariant()
    def nothing_is_in_effect_without_a_level(self) -> None:
        """What a level did is undone with it, at the engine's next safe point, whatever befell the other engine."""
        levels = self.protection.breaker.levels() if self.protection.breaker is not None else {}
        for hands in self.hands:
            if not hands.point.waiting and not hands.stuck and not hands.missed:
                assert max(hands.flags, default=0) <= max(levels.values(), default=0)

    @invariant()
    def faults_are_said_once(self) -> None:
        for line, count in self.lines.counts.items():
            assert count == 1 or ("breaker, process, mode act" in line or "has not renewed" in line
                                  or "command to the breaker" in line), (line, count)

    # -- the end ---------------------------------------------------------------------------------------

    def teardown(self) -> None:
        try:
            self.the_board_s_place_is_free_again()
            self.sensor, self.shift, self.reaching, self.load = True, 0, True, 0.0
            for hands in self.hands:
                hands.how, hands.deaf = FINE, False
            send(self.directory, "engine", Command("hold"))
            self.tick(30)
            self._stands(0)
            self.load = 9.0
            self.tick(10)
            self._stands(3)
            self.load = 0.0
            self.tick(30)
            self._stands(0, undone=True)
            self.load = 9.0
            self.tick(10)
            self.protection.stop(self.now)
            for hands in self.hands:
                hands.point.run()
                assert hands.flags == set()
                assert len(hands.answers) == len(hands.orders)
            assert list(self.boards.iterdir()) == []
            assert self.gate.decision() is None
        finally:
            self.gate.close()
            self.protection.stop(self.now)
            for hands in self.hands:
                hands.point.close()
            self.log.removeHandler(self.lines)
            self.log.propagate = self.propagated
            shutil.rmtree(self.directory)

    def _stands(self, level: int, undone: bool = False) -> None:
        found = BoardReader(self.boards, clock=lambda: self.now).decision()
        assert found is not None
        assert found.level == level
        assert [limits.admit for limits in found.limits] == [True, True, level < 3]
        for hands in self.hands:
            if level or undone:
                assert hands.flags == set(LEVELS[:level]), hands.name
            assert not hands.point.waiting


TestFaults = Faults.TestCase
TestFaults.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFaults.__doc__ = "Whatever fails in whatever order: gates open in doubt, and all is as ordered once it is over."
