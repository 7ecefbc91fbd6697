"""What traces show of a breaker, read back from the SDK's in-memory exporter."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="The OpenTelemetry SDK is missing: pip install 'kvobs[otel]'.")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from kvobs import model, spans
from kvobs.breaker import Protection
from kvobs.breaker._breaker import PATIENCE_NS
from kvobs.config import Config
from kvobs.metrics import Metrics
from kvobs.sources.vllm._requests import OpenRequest
from tests import events

SECOND = 10**9
WALL = 1_700_000_000 * SECOND  # Unix time when the monotonic clock of these tests is 0
POLICY = 'name = "load"\nescalate = "1s"\njitter = 0\n' + "".join(
    f'[[level]]\nany = [{{ signal = "app.load", above = {limit} }}]\nopen = "1s"\n' for limit in (1, 2, 3))
LEVEL_1 = "Level 1 (reorganise) is open: its condition holds."


class Hands:
    """An actuator that answers each order at once: half a second later, 4,096 bytes regained."""

    name = "torch"

    def __init__(self) -> None:
        self.answers: list[model.Event] = []

    def capabilities(self) -> Sequence[model.Capability]:
        return [model.Capability(1, "chunk", True, "")]

    def plan(self, kind: str) -> model.Effect:
        return model.Effect(None, None)

    def submit(self, order: model.Order) -> None:
        began = order.deadline_ns - PATIENCE_NS
        self.answers.append(model.ActionTaken(began + SECOND // 2, self.name, order.level, order.kind, order.undo,
                                              order.generation, True, 4_096, SECOND // 4, True, ""))


class Scene:
    """A process with two devices, a breaker and an exporter."""

    def __init__(self, directory: Path, mode: str) -> None:
        (directory / "policy.toml").write_text(POLICY)
        self.exported, self.hands, self.now = InMemorySpanExporter(), Hands(), 0
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exported))
        self.tracer: Tracer = self.provider.get_tracer("test")
        self.protection = Protection(
            Config(store=None, breaker=mode, breaker_policy=str(directory / "policy.toml")), "one", Metrics(),
            lambda: [SimpleNamespace(actuators=[self.hands])], tracer=lambda: self.tracer, wall=lambda: WALL + self.now)
        assert self.protection.breaker is not None
        for device in ("cuda:0", "cuda:1"):
            self.protection.breaker.device(device, None, "SERVED", 0)

    def under(self, load: float) -> None:
        """A second goes by, and what was answered in the last one is heard."""
        self.now += SECOND
        told, self.hands.answers = self.hands.answers, []
        self.protection.report("app.load", load, self.now)
        self.protection.follow(self.now, told, [], False)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exported.get_finished_spans() if span.name == name]


@pytest.fixture(params=["observe", "act"])
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def scene(tmp_path: Path, mode: str) -> Iterator[Scene]:
    found = Scene(tmp_path, mode)
    yield found
    found.protection.stop(found.now)
    found.provider.shutdown()


def test_a_decision_is_a_span_with_what_it_rested_on(scene: Scene, mode: str) -> None:
    """Each device's transition is one span of no duration at its time: phases, policy, mode, the sentence, the signal's
    value and what was not done instead.
    """
    scene.under(2.5)
    first, second = scene.spans("kvobs.breaker.transition")
    assert dict(first.attributes or {}) == {
        "kvobs.breaker.scope": "cuda:0", "kvobs.breaker.policy": "load", "kvobs.breaker.mode": mode,
        "kvobs.breaker.level": 1, "kvobs.breaker.before": "closed", "kvobs.breaker.after": "open",
        "kvobs.breaker.reason": LEVEL_1, "kvobs.breaker.generation": 1,
        "kvobs.breaker.signal.app.load": 2.5, "kvobs.breaker.rejected": ()}
    assert (first.start_time, first.end_time) == (WALL + SECOND, WALL + SECOND)
    assert second.attributes is not None
    assert second.attributes["kvobs.breaker.scope"] == "cuda:1"
    assert (first.parent, second.parent) == (None, None)
    assert len({first.context.trace_id, second.context.trace_id}) == 2


def test_an_action_is_a_span_linked_to_its_decisions(scene: Scene, mode: str) -> None:
    """Where the breaker acts, each answer is a span over the action's own time with effect, limit and the decision's
    reason, linked to the spans of the devices' decisions that ordered it; in mode observe there is none.
    """
    scene.under(1.5)
    scene.under(1.5)
    found = scene.spans("kvobs.breaker.action")
    assert len(found) == (mode == "act")
    if mode == "observe":
        return
    decisions = scene.spans("kvobs.breaker.transition")
    assert [link.context.span_id for link in found[0].links] == [span.context.span_id for span in decisions]
    assert (found[0].start_time, found[0].end_time) == (WALL + SECOND * 5 // 4, WALL + SECOND * 3 // 2)
    assert dict(found[0].attributes or {}) == {
        "kvobs.breaker.scope": "cuda:0, cuda:1", "kvobs.breaker.actuator": "torch", "kvobs.breaker.kind": "chunk",
        "kvobs.breaker.level": 1, "kvobs.breaker.undo": False, "kvobs.breaker.done": True,
        "kvobs.breaker.regained_bytes": 4_096, "kvobs.breaker.late": True, "kvobs.breaker.limit_s": 0.2,
        "kvobs.breaker.reason": LEVEL_1}


def test_what_a_reset_undoes_has_its_reason_and_no_decision(tmp_path: Path) -> None:
    """The span of an undoing that an operator's reset ordered says so, and is linked to nothing."""
    scene = Scene(tmp_path, "act")
    scene.under(1.5)
    assert scene.protection.breaker is not None
    scene.protection.breaker.reset()
    scene.under(0.0)
    scene.under(0.0)
    last = scene.spans("kvobs.breaker.action")[-1]
    assert last.attributes is not None
    assert (last.attributes["kvobs.breaker.undo"], last.attributes["kvobs.breaker.reason"], last.links) == (
        True, "An operator reset the breaker.", ())
    scene.protection.stop(scene.now)


def test_turns_that_run_where_it_was_decided_have_it_as_an_event(scene: Scene, mode: str) -> None:
    """Of three turns that run, one ended before and one began after, only the two that ran on the decided device, by
    its name or its pool's, have the event, at the decision's time in their trace.
    """
    def turn(device: str, model_name: str = "tiny") -> tuple[spans.OpenTurn, model.Turn]:
        opened = spans.open_turn(scene.tracer, model_name, WALL + scene.now, {}, attach=False)
        return opened, events.turn(start_ns=scene.now, wall_start_ns=WALL + scene.now, t_ns=9 * SECOND,
                                   origin=events.origin(model_name, device))

    def close(opened: spans.OpenTurn, record: model.Turn) -> list[tuple[str, int]]:
        opened.close(record, [], {}, None, [])
        ended = scene.exported.get_finished_spans()[-1]
        return [(event.name, event.timestamp) for event in ended.events]

    early = turn("cuda:0")
    assert close(*early) == []
    running = [turn("cuda:0"), turn("cuda:1"), turn("cuda:2"), turn("cuda:1", "other")]
    scene.under(1.5)
    late = turn("cuda:0")
    event = ("kvobs.breaker.decision", WALL + SECOND)
    assert [close(*one) for one in [*running, late]] == [[event], [event], [], [event], []]
    told = scene.spans("text_completion tiny")[1].events[0].attributes
    assert told is not None
    assert (told["kvobs.breaker.scope"], told["kvobs.breaker.mode"], told["kvobs.breaker.reason"]) == (
        "cuda:0", mode, LEVEL_1)


def test_a_request_whose_span_is_the_front_end_s_tells_it_what_it_heard() -> None:
    """A request of the engine core without a span keeps what concerns its pool among the marks that it hands on."""
    request = OpenRequest(SimpleNamespace(request_id="r"), events.origin("tiny", "cuda:0"), 0, WALL)
    spans.listen(request)
    for scope in ("cuda:0", "tiny@cuda:0", "process", "cuda:1", "other@cuda:0"):
        spans.announce(scope, spans.Mark(SECOND, scope, {}))
    spans.deafen(request)
    spans.announce("process", spans.Mark(SECOND, "too late", {}))
    assert [mark.name for mark in request.marks] == ["cuda:0", "tiny@cuda:0", "process"]


def test_what_turns_hear_is_bounded_and_turns_that_vanish_are_forgotten(scene: Scene) -> None:
    """A turn keeps 64 events of a thousand, and one that is dropped without an end leaves nothing behind."""
    before = len(spans._running)
    opened = spans.open_turn(scene.tracer, "tiny", WALL, {}, attach=False)
    dropped = spans.open_turn(scene.tracer, "tiny", WALL, {}, attach=False)
    dropped.span.end()
    del dropped
    gc.collect()
    assert len(spans._running) == before + 1
    for _ in range(1_000):
        spans.announce("process", spans.Mark(SECOND, "decided", {}))
    opened.close(events.turn(), [], {}, None, [])
    assert len(scene.exported.get_finished_spans()[-1].events) == 64
    assert len(spans._running) == before
