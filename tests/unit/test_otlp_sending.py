"""Losses are counted, nothing is lost silently, and a blocked exporter blocks nobody else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("opentelemetry.sdk", reason="The OpenTelemetry SDK is not installed (extra otel).")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from kvobs.exporters._pusher import Pusher
from kvobs.exporters._sdk import SpanQueue
from kvobs.exporters._sender import Sender
from tests.support import wait_until

THIRD_PARTY = "opentelemetry.exporter.otlp.proto.test"


class Scripted:
    """An exporter whose answers a test decides; ``gate`` holds every export until it is set."""

    def __init__(self, answer: Callable[[], object] = lambda: SpanExportResult.SUCCESS) -> None:
        self.answer = answer
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.batches: list[int] = []
        self.shut = 0

    def export(self, batch: list[object]) -> object:
        self.entered.set()
        assert self.gate.wait(30)
        self.batches.append(len(batch))
        return self.answer()

    def shutdown(self) -> None:
        self.shut += 1


@pytest.fixture
def lost() -> list[int]:
    return []


@pytest.fixture
def queues() -> Iterator[list[SpanQueue]]:
    found: list[SpanQueue] = []
    yield found
    for queue in found:
        queue.pusher.finish()
        assert queue.pusher.join(30)


def _queue(queues: list[SpanQueue], exporter: Scripted, lost: list[int], **environ: str) -> tuple[
        SpanQueue, TracerProvider]:
    queue = SpanQueue(exporter, lost.append, environ)
    queues.append(queue)
    provider = TracerProvider(sampler=ALWAYS_ON, shutdown_on_exit=False)
    provider.add_span_processor(queue)
    return queue, provider


def _end_spans(provider: TracerProvider, number: int) -> None:
    tracer = provider.get_tracer("test")
    for _ in range(number):
        tracer.start_span("s").end()


def test_every_span_arrives_once(queues: list[SpanQueue], lost: list[int]) -> None:
    """Spans are delivered in batches of the configured size, each once, none lost."""
    exporter = Scripted()
    queue, provider = _queue(queues, exporter, lost, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10")
    _end_spans(provider, 35)
    assert queue.pusher.wait(queue.pusher.ask(), 30)
    assert sum(exporter.batches) == 35
    assert max(exporter.batches) <= 10
    assert (queue.take_dropped(), lost) == (0, [])


def test_a_full_queue_drops_and_counts_while_the_exporter_blocks(queues: list[SpanQueue], lost: list[int]) -> None:
    """A thousand spans end while one export is blocked: taken, queued and dropped ones add up to all of them."""
    exporter = Scripted()
    exporter.gate.clear()
    queue, provider = _queue(queues, exporter, lost, OTEL_BSP_MAX_QUEUE_SIZE="16", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4")
    _end_spans(provider, 4)
    assert exporter.entered.wait(30)
    _end_spans(provider, 1000)  # returns although the exporter is still blocked
    assert exporter.batches == []
    assert queue.take_dropped() == 1000 - 16
    exporter.gate.set()
    wait_until(lambda: sum(exporter.batches) == 20, what="the queued spans are exported")
    assert lost == []


@pytest.mark.parametrize("answer", [lambda: SpanExportResult.FAILURE, lambda: 1 / 0])
def test_failed_batches_are_counted_and_said_once(answer: Callable[[], object], lost: list[int],
                                                  caplog: pytest.LogCaptureFixture) -> None:
    """A refusing or raising exporter loses whole batches, which are counted; the log has one sentence in all."""
    sender = Sender("spans", Scripted(answer), SpanExportResult.SUCCESS, lost.append)
    with caplog.at_level(logging.WARNING):
        for size in (3, 4, 5):
            sender.send([0] * size, size)
    sender.close()
    assert lost == [3, 4, 5]
    assert len(caplog.records) == 1
    assert "could not be delivered over OTLP" in caplog.text


def test_the_exporters_own_noise_is_dropped_on_kvobs_threads_only(caplog: pytest.LogCaptureFixture) -> None:
    """What a third-party exporter logs while kvobs sends is kept for our one sentence; the same logger still speaks
    for others, and after close it has no filter of ours."""
    logger = logging.getLogger(THIRD_PARTY)
    filters = list(logger.filters)

    def refuse() -> object:
        logger.error("code 503")
        return SpanExportResult.FAILURE

    sender = Sender("spans", Scripted(refuse), SpanExportResult.SUCCESS, lambda _: None)
    with caplog.at_level(logging.WARNING):
        sender.send([0], 1)
        logger.error("an exporter of the application")
    sender.close()
    assert [record.name for record in caplog.records] == ["kvobs", THIRD_PARTY]
    assert "code 503" in caplog.records[0].getMessage()
    assert logger.filters == filters


def test_closing_counts_the_batch_in_flight_exactly_once(lost: list[int]) -> None:
    """A batch that is stuck when the sender closes counts as lost then, and not again when its export fails."""
    exporter = Scripted(lambda: SpanExportResult.FAILURE)
    exporter.gate.clear()
    sender = Sender("spans", exporter, SpanExportResult.SUCCESS, lost.append)
    thread = threading.Thread(target=sender.send, args=([0] * 7, 7))
    thread.start()
    assert exporter.entered.wait(30)
    sender.close()
    assert lost == [7]
    exporter.gate.set()
    thread.join(30)
    assert lost == [7]
    sender.send([0], 1)
    assert lost == [7, 1]
    assert exporter.shut == 1


def test_unsampled_spans_are_not_queued(queues: list[SpanQueue], lost: list[int]) -> None:
    """A span that the sampler left out is neither exported nor counted as lost."""
    exporter = Scripted()
    queue = SpanQueue(exporter, lost.append, {})
    queues.append(queue)
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    provider.add_span_processor(queue)
    _end_spans(provider, 5)
    assert queue.pusher.wait(queue.pusher.ask(), 30)
    assert (exporter.batches, lost, queue.take_dropped()) == ([], [], 0)


def test_a_pusher_pushes_once_more_at_its_end() -> None:
    """Finish makes exactly one last push, even when a push was under way."""
    entered, gate, pushes = threading.Event(), threading.Event(), []

    def push() -> None:
        entered.set()
        assert gate.wait(30)
        pushes.append(1)

    pusher = Pusher("kvobs-test", push, 3600)
    pusher.ask()
    assert entered.wait(30)
    pusher.finish()
    assert not pusher.join(0)
    gate.set()
    assert pusher.join(30)
    assert len(pushes) == 2


def test_a_pusher_survives_a_push_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """A push that raises is logged once, and the next one happens."""
    pushes = []

    def push() -> None:
        pushes.append(1)
        raise RuntimeError("no")

    pusher = Pusher("kvobs-test", push, 3600)
    assert pusher.wait(pusher.ask(), 30)
    assert pusher.wait(pusher.ask(), 30)
    pusher.finish()
    assert pusher.join(30)
    assert len(pushes) == 3
    assert len(caplog.records) == 1
