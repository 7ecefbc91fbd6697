"""The queue of orders against a plain account of what must become of each."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvobs.model import ActionTaken, Capability, Effect, Event, Order
from kvobs.sources._safe_point import Action, Result, SafePoint

KINDS = {"count": (1, False), "flag": (1, True), "switch": (2, True), "fails": (2, True), "none": (1, False)}


class Orders(RuleBasedStateMachine):
    """Orders of three levels come and are carried out, while the clock goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000
        self.done: list[str] = []
        self.set: set[str] = set()
        self.answers: list[ActionTaken] = []
        self.waiting: list[Order] = []
        self.expected: list[tuple[Order, bool]] = []
        self.newest: dict[int, int] = {}
        self.effects: list[str] = []
        self.point = SafePoint("engine", [self._action(kind) for kind in KINDS if kind != "none"], self._emit,
                               clock=lambda: self.now)

    def _emit(self, event: Event) -> None:
        assert isinstance(event, ActionTaken)
        self.answers.append(event)

    def _action(self, kind: str) -> Action:
        level, reversible = KINDS[kind]

        def carry_out(_: int) -> Result:
            self.now += 3
            self.done.append(kind)
            if kind == "fails":
                raise OSError("no")
            if reversible:
                self.set.add(kind)
            return Result(True, 7)

        def undo(_: int) -> Result:
            self.done.append(f"un{kind}")
            self.set.discard(kind)
            return Result(True)

        return Action(Capability(level, kind, reversible, "Do it."), lambda: Effect(0, None), carry_out,
                      undo if reversible else None)

    @rule(kind=st.sampled_from(sorted(KINDS)), undo=st.booleans(), generation=st.integers(1, 4),
          left=st.integers(-2, 20), limit=st.none() | st.integers(0, 5))
    def submit(self, kind: str, undo: bool, generation: int, left: int, limit: int | None) -> None:
        order = Order(KINDS[kind][0], kind, generation, self.now + left, undo, limit)
        self.newest[order.level] = max(generation, self.newest.get(order.level, 0))
        self.waiting.append(order)
        self.point.submit(order)

    @rule(by=st.integers(0, 15))
    def time_passes(self, by: int) -> None:
        self.now += by

    def _outdated(self, order: Order, now: int) -> bool:
        return order.generation < self.newest[order.level] or (now > order.deadline_ns and not order.undo)

    @precondition(lambda self: self.waiting)
    @rule()
    def safe_point(self) -> None:
        now, held = self.now, {kind for kind in self.set if kind != "fails"}
        for order in self.waiting:
            reversible = KINDS[order.kind][1]
            if self._outdated(order, now) or order.kind == "none" or (order.undo and not reversible):
                self.expected.append((order, False))
            elif order.undo:
                self.effects += [f"un{order.kind}"] if order.kind in held else []
                held.discard(order.kind)
                self.expected.append((order, True))
            else:
                now += 3
                self.effects.append(order.kind)
                if order.kind == "fails":
                    self.effects.append("unfails")  # rolled back
                elif reversible:
                    held.add(order.kind)
                self.expected.append((order, order.kind != "fails"))
        self.waiting = []
        self.point.run()
        assert self.set == held

    @rule()
    def somebody_looks_in(self) -> None:
        self.expected += [(order, False) for order in self.waiting if self._outdated(order, self.now)]
        self.waiting = [order for order in self.waiting if not self._outdated(order, self.now)]
        self.point.expire()

    @invariant()
    def each_is_answered_once(self) -> None:
        assert [(taken.kind, taken.generation, taken.undo, taken.level, taken.done) for taken in self.answers] == [
            (order.kind, order.generation, order.undo, order.level, done) for order, done in self.expected]
        assert self.done == self.effects
        assert self.point.waiting == bool(self.waiting)
        assert set(self.point.in_effect()) == self.set
        for taken, (order, done) in zip(self.answers, self.expected, strict=True):
            assert bool(taken.bytes) == (done and not order.undo)
            began = bool(taken.duration_ns or done)
            assert taken.late == (began and (taken.t_ns > order.deadline_ns if order.limit_ns is None
                                             else taken.duration_ns > order.limit_ns))
            assert taken.done or taken.reason.endswith(".")

    def teardown(self) -> None:
        self.point.close()
        assert self.set == set()
        assert len(self.answers) == len(self.expected) + len(self.waiting)


TestOrders = Orders.TestCase
TestOrders.__doc__ = "Whatever is ordered when, each order is answered once, in order; only due ones are carried out."
