"""The breaker of an observed process as its configuration has it: made, fed, commanded, told.

What it decides for requests goes to a decision board beside the store, which gates in this and in other processes read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry.trace import NoOpTracer

from kvobs import model
from kvobs.breaker._board import BoardWriter, board_directory
from kvobs.breaker._breaker import Breaker, asked
from kvobs.breaker._commands import take
from kvobs.breaker._gate import Decision, Probation
from kvobs.breaker._limits import ByPriority, by_priority
from kvobs.breaker._live import Asked
from kvobs.breaker._operator import Operator, token_of
from kvobs.breaker._policy import PRESETS, PolicyError, load_policy
from kvobs.breaker._policy_file import PolicyFile
from kvobs.breaker._probing import DEGRADE
from kvobs.breaker._traces import Traces
from kvobs.config import TTFT, Config
from kvobs.metrics import Metrics
from kvobs.slo import Standing

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_log = logging.getLogger("kvobs")
RENEWED_NS = 1_000_000_000  # also where a resting process is looked at less often
HOLDS_NS = 3_000_000_000  # a decision that is not renewed for so long is none: the breaker's process hangs
RETRY_AFTER_S = 5.0
POLICY, POLICY_FILE = "breaker policy", "breaker policy file"  # subjects of facts
UNTOLD = "Nothing in this process has told it yet, so that conditions on it do not hold."
UNASKED = "Nothing in this process had told it, and the policy asks for it no more."


class Protection:
    """``breaker`` is None where its policy was refused; then ``facts`` says why."""

    def __init__(self, config: Config, process_id: str, metrics: Metrics,
                 sources: Callable[[], Sequence[model.Source]], clock: Callable[[], int] | None = None,
                 tracer: Callable[[], Tracer] = NoOpTracer, wall: Callable[[], int] = time.time_ns) -> None:
        self._store, self._process_id, self._metrics = config.store, process_id, metrics
        self._token = config.control_token
        self.breaker: Breaker | None = None
        self.facts: list[model.Availability] = []
        self._board: BoardWriter | None = None
        self._limits = ByPriority()
        self._traces = Traces(tracer, wall)
        self._sources, self._asked = sources, Asked(metrics, config.overhead_percent / 100)
        self._published: tuple[int, int, Probation | None] | None = None  # level, generation, probes
        self._published_ns = 0
        self._first_byte_ns = min((one.at_most for one in config.objectives if one.signal == TTFT), default=None)
        self._shown: set[str] = set()  # scopes that have a point
        self._missed: set[str] = set()  # signals that were said to be untold
        self._reason, self._now_ns = "", 0
        named = config.breaker_policy
        self._file = None if named in PRESETS else PolicyFile(Path(named))
        self._reloads, self._refusal = 0, ""
        # Where the process is stopped between deciding and publishing, the decision is as old as it is.
        self._clock = clock if clock is not None else lambda: self._now_ns
        self._failed = False  # the board, and it was said
        self._lost: set[str] = set()  # sources whose actuators could not be had, and it was said
        try:
            self.breaker = Breaker(load_policy(config.breaker_policy), config.breaker,
                                   lambda: self._hands(sources()))
        except PolicyError as error:
            self.facts.append(model.Availability("breaker", False, str(error)))
            _log.warning("kvobs: there is no breaker: %s", error)

    def _hands(self, sources: Sequence[model.Source]) -> list[model.Actuator]:
        """What can act; a source that fails here costs the others nothing."""
        found: list[model.Actuator] = []
        for source in sources:
            try:
                found += getattr(source, "actuators", ())
            except Exception as error:
                if source.name not in self._lost:
                    _log.warning("kvobs: the breaker goes on without the actuators of %s (%s: %s).", source.name,
                                 type(error).__name__, error)
                self._lost.add(source.name)
        return found

    def follow(self, now_ns: int, events: list[model.Event], standings: Sequence[Standing], due: bool) -> None:
        """Let the breaker decide on these events; what it decided is added to them. ``due`` about once a second."""
        breaker = self.breaker
        if breaker is None:
            return
        self._now_ns = now_ns
        if due:
            self._reload(breaker)
        if due and self._store is not None:
            breaker.obey(take(self._store, self._process_id))
        if due:
            events += self._asked.tell(breaker, self._sources(), now_ns)
        decided = breaker.follow(now_ns, events, standings)
        events += decided
        if due:
            events += self._told(breaker)
        levels = breaker.levels()
        for scope in self._shown | levels.keys():
            self._metrics.set("kvobs.breaker.level", (scope, breaker.mode), levels.get(scope))
        self._shown = set(levels)
        if decided:
            self._reason = decided[-1].reason
        self._publish(breaker, max(levels.values(), default=0), now_ns)
        self._traces.tell(now_ns, events, breaker.causes)

    def _reload(self, breaker: Breaker) -> None:
        """Go on under the policy that the file has now; a file that is refused leaves everything as it is."""
        try:
            policy = self._file.look() if self._file is not None else None
        except PolicyError as error:
            self._refusal = str(error)
            _log.warning("kvobs: the breaker keeps the policy %s that it had: %s", breaker.policy.name, error)
            return
        if policy is None:
            return
        self._refusal = ""
        if policy != breaker.policy:
            breaker.adopt(policy)
            self._reloads += 1
            _log.warning("kvobs: the breaker goes on under the policy %s, reloaded from its file.", policy.name)

    def _told(self, breaker: Breaker) -> list[model.Availability]:
        """Which policy is in force (since this fact changed), whether its file was refused, and untold signals."""
        often = "once" if self._reloads == 1 else f"{self._reloads} times"
        reloaded = f", reloaded {often}" if self._reloads else ""
        where = f" of {self._file.path}{reloaded}" if self._file is not None else ""
        facts = [model.Availability(POLICY, True, f"{breaker.policy.name}{where}.")]
        if self._file is not None:
            facts.append(model.Availability(POLICY_FILE, not self._refusal, self._refusal))
        asked_for = asked(breaker.policy)
        for name in sorted(self._missed | breaker.untold):
            told = name not in breaker.untold and name in asked_for
            why = "" if told else UNTOLD if name in asked_for else UNASKED
            facts.append(model.Availability(f"breaker signal {name}", told, why))
        self._missed = set(breaker.untold)
        return facts

    def _publish(self, breaker: Breaker, level: int, now_ns: int) -> None:
        """Have gates see the decision in force; it is renewed about once a second. On probation the limits of level 3
        stay, but for its probes.
        """
        probation = breaker.probing.of(self._process_id, breaker.policy, breaker.states(), self._first_byte_ns)
        level = level if probation is None else DEGRADE
        published = level, breaker.decisions, probation
        if self._store is None or (published == self._published and now_ns - self._published_ns < RENEWED_NS):
            return
        try:
            if self._board is None:
                self._board = BoardWriter(board_directory(self._store), self._process_id, self._clock)
            self._board.publish(Decision(
                generation=breaker.decisions, level=level, mode=breaker.mode, limits=by_priority(self._limits, level),
                retry_after_s=RETRY_AFTER_S, expires_ns=now_ns + HOLDS_NS, reason=self._reason,
                probation=probation))
        except OSError as error:
            if not self._failed:
                _log.warning("kvobs: gates are open, since the decision board cannot be written: %s", error)
            self._failed = True
        self._published, self._published_ns = published, now_ns

    def report(self, name: str, value: float, now_ns: int) -> None:
        """Take a signal of the application; raises ValueError for a name that it may not report."""
        if self.breaker is not None:
            self.breaker.report(name, value, now_ns)

    def operator(self) -> Operator | None:
        """What an operator may see and do over HTTP; None where there is no breaker."""
        if self.breaker is None:
            return None
        token = self._token
        try:
            token = token or (token_of(self._store) if self._store is not None else "")
        except (OSError, ValueError) as error:
            _log.warning("kvobs: no commands to the breaker are taken over HTTP: %s", error)
        return Operator(self.breaker, self._process_id, token, self._clock)

    def stop(self, now_ns: int) -> None:
        """Undo what is applied, and take the board away: gates open."""
        if self.breaker is not None:
            self.breaker.stop(now_ns)
        if self._board is not None:
            self._board.close()
            self._board, self._store = None, None

    def abandon(self) -> None:
        """In a forked child: the breaker and its board are the parent's."""
        if self._board is not None:
            self._board.abandon()
        self.breaker = None
