"""The running breaker of a process: signals to the machine of each scope, its transitions to orders and events.

The drain thread calls ``tick``; nothing here waits, and no lock is held while an actuator is given its orders. In mode
``observe`` everything is decided and told, and nothing is ordered. An actuator serves the whole process: a level's
actions are undone when no scope has it open any more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from kvobs import model
from kvobs.breaker._commands import Command
from kvobs.breaker._conditions import Reading, leaves
from kvobs.breaker._gate import ACT
from kvobs.breaker._machine import adopt, begin, override, reset, step
from kvobs.breaker._probing import Probing
from kvobs.breaker._sense import MOST_SCOPES, Senses
from kvobs.breaker._states import LEVELS, Phase, Policy, State
from kvobs.slo import Standing

SECOND = 10**9
# The article's recovery times (S11), as time limits of the actions of levels 1 to 3.
LIMITS_NS = (SECOND // 5, 6 * SECOND // 5, 3 * SECOND)
# An order waits so long for the engine's safe point: a step on a CPU takes longer than the least of these limits.
PATIENCE_NS = 10 * SECOND
AGAIN_NS = SECOND  # what acts on what is there is ordered again no more often
MOST_CAUSES = 256  # that are remembered
MOST_COMMANDS = 64  # that wait for the next tick
Cause = tuple[model.Decided, ...] | str  # the decisions that orders were given for, or what else they were for
_log = logging.getLogger("kvobs")


def asked(policy: Policy) -> set[str]:
    """The signals that a policy names."""
    return {leaf.signal for level in policy.levels for leaf in leaves(level.condition)}


class Breaker:
    """One process's breaker. Commands may come from any thread; they are taken up by the next tick."""

    def __init__(self, policy: Policy, mode: str, actuators: Callable[[], Sequence[model.Actuator]]) -> None:
        self.policy, self.mode = policy, mode
        self._actuators = actuators
        self._senses = Senses()
        self._states: dict[str, State] = {}
        self._commands: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.probing = Probing()
        self._given_ns: dict[int, int] = {}  # when each level's latest orders were given
        self._orders = 0  # generations of orders, in one line for all scopes and levels
        self.causes: dict[int, Cause] = {}  # why the latest orders were given, by their generation
        self._failed: set[str] = set()
        self._held: int | None = None
        self._stopped = False
        self.decisions = 0  # so far
        self.untold = asked(policy)  # so far
        self.adopted_ns: int | None = None  # when this policy's first step was made

    # -- commands (any thread) -------------------------------------------------------------------------

    def report(self, name: str, value: float, t_ns: int) -> None:
        """Take a signal of the application; raises ValueError for a name that it may not report."""
        with self._lock:
            self._senses.report(name, value, t_ns)

    def hold(self, level: int | None) -> bool:
        """Hold a level in every scope, or let the machine have its way again; False where too many commands wait.

        Raises:
            ValueError: there is no such level; a whole sentence.
        """
        if level is not None and not 0 <= level < len(LEVELS):
            raise ValueError(f"There is no level {level}; allowed are 0 to {len(LEVELS) - 1}.")
        return self._command(lambda: self._hold(level))

    def reset(self) -> bool:
        """Close all levels and forget their failures; what was ordered is undone. False where too many wait."""
        return self._command(self._reset)

    def obey(self, commands: Iterable[Command]) -> None:
        """Take an operator's commands; one that makes no sense is logged."""
        for command in commands:
            try:
                if command.what == "reset":
                    self.reset()
                elif command.what == "hold":
                    self.hold(command.level)
                else:
                    raise ValueError(f"There is no command {command.what!r}.")
            except ValueError as error:
                _log.warning("kvobs: a command to the breaker was refused: %s", error)

    def _command(self, command: Callable[[], None]) -> bool:
        with self._lock:
            taken = len(self._commands) < MOST_COMMANDS
            if taken:
                self._commands.append(command)
        return taken

    # -- the drain thread ------------------------------------------------------------------------------

    def adopt(self, policy: Policy) -> None:
        """Go on under another policy: levels stay as they are, and the new conditions decide from the next tick on."""
        known = asked(self.policy)
        self.untold = {name for name in asked(policy) if name in self.untold or name not in known}
        self._states = {scope: adopt(self.policy, policy, state) for scope, state in self._states.items()}
        self.policy, self.adopted_ns = policy, None

    def fold(self, events: Iterable[model.Event]) -> None:
        """Take events into account."""
        with self._lock:
            self._senses.fold(events)

    def device(self, device: str, headroom: float | None, verdict: str | None, t_ns: int) -> None:
        """Take what is left on a device (a share), and what becomes of the next step of its caches, where known."""
        with self._lock:
            if headroom is not None:
                self._senses.headroom(device, headroom, t_ns)
            if verdict is not None:
                self._senses.verdict(device, verdict, t_ns)

    def fragmentation(self, device: str, rate: float, t_ns: int) -> None:
        """Take the article's fragmentation rate of the caches on a device."""
        with self._lock:
            self._senses.fragmentation(device, rate, t_ns)

    def follow(self, now_ns: int, events: Iterable[model.Event], standings: Sequence[Standing]) -> list[model.Decided]:
        """Take events into account and make a step; what was decided is logged."""
        self.fold(events)
        decided = self.tick(now_ns, standings)
        for told in decided:
            _log.warning("kvobs: breaker, %s, mode %s: %s", told.scope, told.mode, told.reason)
        return decided

    def tick(self, now_ns: int, standings: Sequence[Standing]) -> list[model.Decided]:
        """Let every scope's machine make a step; returns what was decided."""
        if self._stopped:
            return []
        if self.adopted_ns is None:
            self.adopted_ns = now_ns
        with self._lock:
            commands, self._commands = self._commands, []
            signals = self._senses.signals(now_ns, standings)
        self.untold.difference_update(*signals.values())
        for command in commands:
            command()
        gone = [scope for scope, state in self._states.items() if scope not in signals and not state.engaged]
        for scope in gone:
            del self._states[scope]
        self.probing.ended(self._states)
        made = [told for scope in dict.fromkeys([*self._states, *signals])
                if (told := self._step(scope, signals.get(scope, {}), now_ns)) is not None]
        self.probing.begin(self.policy, self._states, now_ns)
        if self.mode == ACT:
            self._order(made, now_ns)
            self._order_again(now_ns)
        return made

    def _step(self, scope: str, signals: dict[str, Reading], now_ns: int) -> model.Decided | None:
        state = self._states.get(scope)
        if state is None:
            if len(self._states) >= MOST_SCOPES:
                return None
            state = override(begin(self.policy, now_ns), self._held)
        self._states[scope], transition = step(self.policy, state, signals, now_ns)
        if transition is None:
            return None
        self.decisions += 1
        return model.Decided(now_ns, scope, self.policy.name, self.mode, transition.level, transition.before.value,
                             transition.after.value, transition.reason, transition.readings, transition.rejected,
                             transition.generation)

    def states(self) -> dict[str, State]:
        """Each scope's machine as it is now; any thread may ask."""
        return dict(self._states)

    def levels(self) -> dict[str, int]:
        """The highest level that is open in each scope."""
        return {scope: state.level for scope, state in self._states.items()}

    def stop(self, now_ns: int) -> None:
        """Undo what is applied: the process goes on without a breaker."""
        self._stopped = True
        self._undo(now_ns, "The breaker ends.")

    def _undo(self, now_ns: int, why: str) -> None:
        applied = [number for number in range(1, len(LEVELS)) if self._applied(number)]
        self._states = {}
        for number in reversed(applied if self.mode == ACT else []):
            self._give(number, now_ns, why, undo=True)

    # -- orders ----------------------------------------------------------------------------------------

    def _hold(self, level: int | None) -> None:
        self._held = level
        self._states = {scope: override(state, level) for scope, state in self._states.items()}

    def _reset(self) -> None:
        states = {scope: reset(self.policy, state) for scope, state in self._states.items()}
        self._undo(max((state.now_ns for state in states.values()), default=0), "An operator reset the breaker.")
        self._states, self._held = states, None

    def _applied(self, level: int) -> bool:
        return any(state.levels[level - 1].phase is Phase.OPEN for state in self._states.values())

    def _order(self, made: Sequence[model.Decided], now_ns: int) -> None:
        """Give the orders of a tick's decisions: those of scopes that open a level together are given once."""
        for level in dict.fromkeys(told.level for told in made):
            opened = tuple(told for told in made if told.level == level and told.after == Phase.OPEN.value)
            left = tuple(told for told in made if told.level == level and told.before == Phase.OPEN.value)
            if opened:
                self._give(level, now_ns, opened, undo=False)
            elif left and not self._applied(level):
                self._give(level, now_ns, left, undo=True)

    def _order_again(self, now_ns: int) -> None:
        """Of open levels what acts on what is there: sessions that have fallen idle since, say."""
        for level in [number for number in range(1, len(LEVELS)) if self._applied(number)]:
            if now_ns - self._given_ns.get(level, now_ns) >= AGAIN_NS:
                self._give(level, now_ns, f"Level {level} ({LEVELS[level]}) is still open.", undo=False, again=True)

    def _give(self, level: int, now_ns: int, why: Cause, *, undo: bool, again: bool = False) -> None:
        self._given_ns[level] = now_ns
        orders: list[tuple[model.Actuator, str]] = []
        try:
            actuators = self._actuators()
        except Exception as error:
            actuators = ()
            self._say("the actuators", error)
        until_ns, limit_ns = now_ns + PATIENCE_NS, LIMITS_NS[level - 1]
        for actuator in actuators:
            try:
                if again and getattr(actuator, "waiting", False):
                    continue  # its engine has not come to a safe point since
                for one in actuator.capabilities():
                    if one.level != level:
                        continue
                    wanted = one.again and actuator.plan(one.kind).bytes if again else one.reversible or not undo
                    if wanted:
                        orders.append((actuator, one.kind))
            except Exception as error:
                self._say(f"the actuator {getattr(actuator, 'name', type(actuator).__name__)}", error)
        if again and not orders:
            return  # what is remembered of orders is bounded
        self._orders += 1
        self.causes[self._orders] = why
        self.causes.pop(self._orders - MOST_CAUSES, None)
        for actuator, kind in orders:
            try:
                actuator.submit(model.Order(level, kind, self._orders, until_ns, undo, limit_ns))
            except Exception as error:
                self._say(f"the actuator {getattr(actuator, 'name', type(actuator).__name__)}", error)

    def _say(self, what: str, error: Exception) -> None:
        if what not in self._failed:
            self._failed.add(what)
            _log.warning("kvobs: %s failed (%s: %s); the breaker goes on without.", what, type(error).__name__, error)
