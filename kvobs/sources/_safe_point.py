"""The queue between a breaker and an engine: orders come from any thread, and the engine's safe point carries them out.

An engine's hook costs one attribute test per step: ``if point.waiting: point.run()``. ``run`` carries out what waits,
in its order, each once, and answers each order with one ``ActionTaken``; nothing that an action raises reaches the
engine. One thread at a time carries out orders; the others go on with their own work.

An order is outdated by a newer generation of its own level only: level 2 opening takes nothing back of level 1. To undo
is never too late: an engine that was idle past the deadline must not stay degraded.

An idle engine reaches no safe point. Where ``idle`` is given, a thread of its own looks after what waits, and carries
it out whenever ``idle()`` says that now is as safe as any safe point. ``guest`` is for what belongs to no engine
(torch's allocator): its orders are carried out at the safe points of whatever engines this process has.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvobs.model import ActionTaken, Capability, Effect, Emit, Order

MOST_WAITING = 64
CLOSING_S = 5.0
PATIENCE_S = 0.05  # an engine that runs gets there itself
_log = logging.getLogger("kvobs")
_points: weakref.WeakSet[SafePoint] = weakref.WeakSet()


class Result(msgspec.Struct, frozen=True, gc=False):
    """What an action did. ``bytes`` were given back, measured. ``done`` is False where nothing was changed, and then
    ``reason`` is a whole sentence; what is already so is done, with 0 bytes.
    """

    done: bool
    bytes: int = 0
    reason: str = ""


class Action(msgspec.Struct, frozen=True):
    """Something that can be done to an engine. ``carry_out`` and ``undo`` take the deadline (monotonic ns), by which
    they should end, and run at the safe point; ``plan`` runs on any thread and changes nothing. Whatever they raise
    becomes an answer. ``undo`` is there just where the capability is reversible.
    """

    capability: Capability
    plan: Callable[[], Effect]
    carry_out: Callable[[int], Result]
    undo: Callable[[int], Result] | None = None


def refused(reason: str) -> Result:
    """Nothing was changed, for a reason."""
    return Result(False, 0, reason)


class SafePoint:
    """An ``Actuator`` over some actions. The engine's hooks test ``waiting`` and call ``run``."""

    def __init__(self, name: str, actions: Iterable[Action], emit: Emit, clock: Callable[[], int] = time.monotonic_ns,
                 *, idle: Callable[[], bool] | None = None, guest: bool = False) -> None:
        self.name = name
        self.waiting = False
        self._idle, self._guest = idle, guest
        self._actions = {action.capability.kind: action for action in actions}
        self._emit, self._clock = emit, clock
        self._in_effect: list[str] = []
        self._logged: set[str] = set()
        self._closed = False
        self._renew()
        _points.add(self)

    def _renew(self) -> None:
        self._orders: deque[Order] = deque()
        self._newest: dict[int, int] = {}
        self._queue, self._running = threading.Lock(), threading.Lock()
        self._closing = threading.Event()
        self._helper: threading.Thread | None = None

    # -- any thread ------------------------------------------------------------------------------------

    def capabilities(self) -> Sequence[Capability]:
        """What can be done here, in the order in which it was given."""
        return tuple(action.capability for action in self._actions.values())

    def plan(self, kind: str) -> Effect:
        """What that would do now; an action that cannot tell says why.

        Raises:
            ValueError: it is not among the capabilities.
        """
        action = self._actions.get(kind)
        if action is None:
            raise ValueError(f"{kind!r} is no action of {self.name}; it has {', '.join(self._actions) or 'none'}.")
        try:
            return action.plan()
        except Exception as error:
            return Effect(None, None, f"What {kind} would do cannot be told ({type(error).__name__}: {error}).")

    def submit(self, order: Order) -> None:
        """Queue an order for the next safe point; what can never be carried out is answered at once."""
        why = ""
        with self._queue:
            if self._closed:
                why = f"{self.name} is not observed any more."
            elif len(self._orders) >= MOST_WAITING:
                why = f"{MOST_WAITING} orders wait already."
            else:
                self._newest[order.level] = max(order.generation, self._newest.get(order.level, order.generation))
                self._orders.append(order)
                self.waiting = True
                self._be_helped()
        if why:
            self._answer(order, refused(why))
        elif self._guest:
            for point in list(_points):
                if not point._guest:
                    point.waiting = True

    def expire(self) -> None:
        """Answer what waits and has become overdue or outdated; for a thread that looks in now and then, where there
        is no ``idle``.
        """
        with self._queue:
            judged = [(order, self._overtaken(order)) for order in self._orders]
            self._orders = deque(order for order, why in judged if not why)
            if judged:  # else it may be set for guests, who are served at the next safe point
                self.waiting = bool(self._orders)
        for order, why in judged:
            if why:
                self._answer(order, refused(why))

    def in_effect(self) -> tuple[str, ...]:
        """The kinds that were carried out, can be undone and have not been."""
        return tuple(self._in_effect)

    def after_fork_in_child(self) -> None:
        """What waited is the parent's to answer, and its threads may have held the locks."""
        self.waiting = False
        self._renew()

    def close(self) -> None:
        """Undo what is in effect, the latest first, and answer what waits; nothing is taken any more."""
        with self._queue:
            self._closed, self.waiting = True, False
            left, self._orders = list(self._orders), deque()
            self._closing.set()
            helper = self._helper
        _points.discard(self)
        if helper is not None and helper is not threading.current_thread():
            helper.join(CLOSING_S)
        for order in left:
            self._answer(order, refused(f"{self.name} is not observed any more."))
        if not self._running.acquire(timeout=CLOSING_S):
            _log.warning("kvobs: an action of %s does not end, so what is in effect stays in effect.", self.name)
            return
        try:
            while self._in_effect:
                kind = self._in_effect.pop()
                undo = self._actions[kind].undo
                try:
                    if undo is not None:
                        undo(self._clock())
                except Exception as error:
                    self._say(kind, error)
        finally:
            self._running.release()

    # -- the engine's thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Carry out what waits. Never raises, and never waits for another thread that is at it."""
        if not self._running.acquire(blocking=False):
            return
        try:
            while True:
                with self._queue:
                    order = self._orders.popleft() if self._orders else None
                    self.waiting = bool(self._orders)
                if order is None:
                    break
                self._carry_out(order)
        finally:
            self._running.release()
        if not self._guest:
            for point in list(_points):
                if point._guest and point.waiting:
                    point.run()

    def _carry_out(self, order: Order) -> None:
        why = self._overtaken(order)
        action = self._actions.get(order.kind)
        if action is None:
            why = f"{order.kind!r} is no action of {self.name}; it has {', '.join(self._actions) or 'none'}."
        elif order.undo and action.undo is None:
            why = f"{order.kind} cannot be undone."
        if why or action is None:
            self._answer(order, refused(why))
            return
        began = self._clock()
        if order.limit_ns is not None:  # it counts from here, however long the engine's step was that it waited for
            order = msgspec.structs.replace(order, deadline_ns=began + order.limit_ns)
        result = refused(f"{order.kind} was interrupted.")
        try:
            result = self._undone(order, action) if order.undo else self._done(order, action)
        except Exception as error:
            self._say(order.kind, error)
            result = refused(f"{order.kind} raised {type(error).__name__}: {error}.")
        finally:  # an interrupt of the host passes, answered
            self._answer(order, result, began)

    def _done(self, order: Order, action: Action) -> Result:
        fresh = action.undo is not None and order.kind not in self._in_effect
        if fresh:  # from its beginning: a process that another thread forks now has half of it
            self._in_effect.append(order.kind)
        done = False
        try:
            result = action.carry_out(order.deadline_ns)
            done = result.done
        except BaseException:
            if fresh and action.undo is not None:
                action.undo(order.deadline_ns)  # half of it may have been done
            raise
        finally:
            if fresh and not done:
                self._in_effect.remove(order.kind)
        return result

    def _undone(self, order: Order, action: Action) -> Result:
        if order.kind not in self._in_effect or action.undo is None:
            return Result(True)
        result = action.undo(order.deadline_ns)
        if result.done:
            self._in_effect.remove(order.kind)
        return result

    # -- a thread of its own, while something waits ----------------------------------------------------

    def _be_helped(self) -> None:
        """Called with the queue's lock held."""
        if self._idle is None or self._helper is not None:
            return
        helper = threading.Thread(target=self._help, name="kvobs-orders", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the interpreter is about to end
            return
        self._helper = helper

    def _help(self) -> None:
        assert self._idle is not None
        while not self._closing.wait(PATIENCE_S):
            try:
                self.expire()
                if self.waiting and self._idle():
                    self.run()
            except Exception as error:
                self._say("idle", error)
            with self._queue:
                if not self._orders:
                    self._helper = None
                    return

    # -- answers ---------------------------------------------------------------------------------------

    def _overtaken(self, order: Order) -> str:
        if order.generation < self._newest.get(order.level, order.generation):
            return f"A newer decision (generation {self._newest[order.level]}) has replaced this one."
        late_ns = self._clock() - order.deadline_ns
        if order.undo or late_ns <= 0:
            return ""
        return f"The deadline had passed {late_ns / 1e6:.1f} ms before it could begin."

    def _answer(self, order: Order, result: Result, began_ns: int | None = None) -> None:
        now = self._clock()
        self._emit(ActionTaken(
            t_ns=now, actuator=self.name, level=order.level, kind=order.kind, undo=order.undo,
            generation=order.generation, done=result.done, bytes=result.bytes,
            duration_ns=0 if began_ns is None else now - began_ns,
            late=began_ns is not None and now > order.deadline_ns, reason=result.reason))

    def _say(self, kind: str, error: BaseException) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            _log.warning("kvobs: the action %s of %s raised %s: %s; the process is not affected.", kind, self.name,
                         type(error).__name__, error)
