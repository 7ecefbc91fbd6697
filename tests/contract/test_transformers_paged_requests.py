"""Continuous batching: requests as turns and spans, bounds and failures."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers", reason="transformers is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                    reason="This transformers is older than 5.18; kvobs follows its continuous batching from there on.")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'kvobs[otel]' brings the SDK.")

from opentelemetry import context, trace
from transformers import (
    LlamaForCausalLM,
)
from transformers.generation.continuous_batching import continuous_api

from kvobs import metrics, model, sessions
from tests.contract import paged
from tests.contract.paged import (
    BLOCK_BYTES,
    SMALL_POOL,
    Ledger,
    Observed,
    answers,
    greedy,
    pool,
    prompts,
    stopped,
)
from tests.support import wait_until

pytestmark = pytest.mark.torch
llama, ledger, observed = paged.llama, paged.ledger, paged.observed  # fixtures are found by their names


# -- requests --------------------------------------------------------------------------------------------


def test_a_request_is_a_child_of_its_callers_span(llama: Any, observed: Observed) -> None:
    """The caller's span is the parent, the named session is kept, and nothing is current on the engine's thread."""
    current: list[object] = []
    original = continuous_api.ContinuousBatchProcessor._generation_step
    threads: set[int] = set()

    def watch(processor: Any, network: Any) -> Any:
        current.append(trace.get_current_span().get_span_context().is_valid)
        threads.add(threading.get_ident())
        return original(processor, network)

    continuous_api.ContinuousBatchProcessor._generation_step = watch
    manager = llama.init_continuous_batching(generation_config=greedy(5), continuous_batching_config=pool())
    try:
        with observed.tracer.start_as_current_span("caller") as caller:
            manager.start()
            for _ in range(2):
                with sessions.session("anna", priority="critical"):
                    manager.add_request(prompts(1)[0])
                assert trace.get_current_span() is caller
                wait_until(lambda: manager.get_result(timeout=1), what="the result")
        stopped(manager)
    finally:
        continuous_api.ContinuousBatchProcessor._generation_step = original
    assert context.get_current() == {}
    assert threads.isdisjoint({threading.get_ident()})
    assert current
    assert not any(current)
    turns = observed.of(model.Turn)
    assert [(turn.session, turn.priority, turn.turn) for turn in turns] == [("anna", "critical", 1),
                                                                            ("anna", "critical", 2)]
    spans = {span.name: [] for span in observed.spans.get_finished_spans()}
    for span in observed.spans.get_finished_spans():
        spans[span.name].append(span)
    calls = spans["text_completion LlamaForCausalLM"]
    assert [span.parent.span_id for span in calls] == [caller.get_span_context().span_id] * 2
    assert [format(span.context.span_id, "016x") for span in calls] == [turn.span_id for turn in turns]
    assert len(spans["prefill"]) == len(spans["decode"]) == 2
    assert [span.attributes["gen_ai.usage.output_tokens"] for span in calls] == [5, 5]
    for span, turn in zip(calls, turns, strict=True):
        assert span.end_time - span.start_time == turn.t_ns - turn.start_ns
        assert [event.name for event in span.events] == ["kvobs.scheduled"]


def test_request_ids_of_two_managers_are_two_sessions(llama: Any, observed: Observed) -> None:
    """Both managers call their request req_0; each is the first turn of its own conversation."""
    for _ in range(2):
        answers(llama, prompts(1), greedy(2), pool())
    assert [(turn.session, turn.turn) for turn in observed.of(model.Turn)] == [("req_0", 1), ("req_0", 1)]


def test_a_cancelled_request_is_a_cancelled_turn_and_its_blocks_are_free(llama: Any, observed: Observed) -> None:
    """Cancelling ends the turn with what was generated so far, and the ledger and the metrics show no held bytes."""
    manager = llama.init_continuous_batching(generation_config=greedy(400), continuous_batching_config=pool())
    manager.start()
    manager.add_request(prompts(1)[0], request_id="gone", streaming=True)
    wait_until(lambda: manager.get_result(timeout=1), what="a first token")
    manager.cancel_request("gone")
    wait_until(lambda: observed.of(model.Turn), what="the turn")
    wait_until(lambda: observed.of(model.Blocks)[-1].used == 0, what="the free pool")
    turn, steps = observed.of(model.Turn)[0], observed.of(model.Step)
    stopped(manager)
    assert (turn.outcome, turn.prompt_tokens, turn.session) == ("cancelled", 20, "gone")
    assert turn.new_tokens == len(steps)
    assert turn.kv_bytes == steps[-1].kv_bytes > 0
    folded = metrics.Metrics()
    folded.fold([event for event in observed.all() if not isinstance(event, model.CacheGone)])
    folded.refresh(turn.t_ns)
    usage = {attributes[-1]: value for row, points in folded.collect() if row.name == "kvobs.kv.usage"
             for attributes, value in points.items()}
    assert usage == {"held": 0, "slack": (64 + 2) * BLOCK_BYTES}


def test_a_refused_request_is_no_turn(llama: Any, observed: Observed) -> None:
    """A manager that is stopping takes no requests: no turn, and the span that was begun is ended."""
    manager = llama.init_continuous_batching(generation_config=greedy(2), continuous_batching_config=pool())
    manager.start()
    stopped(manager)
    assert manager.add_request(prompts(1)[0]) is None
    assert observed.of(model.Turn) == []
    assert len(observed.spans.get_finished_spans()) == 1


@pytest.mark.parametrize(("error", "outcome"), [(ValueError("broken"), "error"),
                                                (torch.OutOfMemoryError("no memory"), "out_of_memory")])
def test_an_error_in_a_step_fails_every_open_request(llama: Any, observed: Observed, error: Exception, outcome: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own error reaches the caller unchanged and is each turn's outcome; it is one out-of-memory."""
    forward, calls = type(llama).forward, []

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise error
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(llama), "forward", failing)
    manager = llama.init_continuous_batching(generation_config=greedy(20), continuous_batching_config=pool())
    for prompt in prompts(3):
        manager.add_request(prompt)
    manager.start()
    results: list[Any] = []
    wait_until(lambda: results.append(manager.get_result(timeout=1)) or len([r for r in results if r]) == 3,
               what="three results")
    stopped(manager)
    assert {result.error for result in results if result} == {str(error)}
    assert manager.background_thread_status.fatal_error is error
    turns = observed.of(model.Turn)
    assert [turn.outcome for turn in turns] == [outcome] * 3
    assert len(observed.of(model.Step)) == 3
    assert len(observed.of(model.OutOfMemory)) == (outcome == "out_of_memory")
    ended = [span for span in observed.spans.get_finished_spans() if span.name.startswith("text_completion")]
    assert {span.attributes["error.type"] for span in ended} == {type(error).__qualname__}
    assert observed.of(model.Blocks)[-1].used == 0


def test_two_managers_in_two_threads_keep_their_own_books(llama: Any, observed: Observed) -> None:
    """Two pools at once: each conserves its own blocks, and turns and steps of each belong together."""
    torch.manual_seed(1)
    other = LlamaForCausalLM(llama.config).eval()
    other.set_attn_implementation("sdpa")
    plain = answers(llama, prompts(4), greedy(20), pool(SMALL_POOL))
    observed.of(model.Turn)
    observed._seen.clear()
    found: dict[int, dict[str, list[int]]] = {}

    def work(index: int, network: Any, blocks: int) -> None:
        found[index] = answers(network, prompts(4), greedy(20), pool(blocks))

    workers = [threading.Thread(target=work, args=(0, llama, SMALL_POOL)),
               threading.Thread(target=work, args=(1, other, 14))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert found[0] == plain
    assert len(found[1]) == 4
    totals = {event.cache_id: event.used + event.cached + event.free for event in observed.of(model.Blocks)}
    assert sorted(totals.values()) == [SMALL_POOL, 14]
    for cache_id in totals:
        written = sum(step.bytes_written for step in observed.of(model.Step) if step.cache_id == cache_id)
        turns = [turn for turn in observed.of(model.Turn) if turn.cache_id == cache_id]
        assert sum(turn.bytes_written for turn in turns) == written
        assert sorted(turn.session for turn in turns) == ["req_0", "req_1", "req_2", "req_3"]


# -- bounds and failures ---------------------------------------------------------------------------------


def test_a_freed_cache_is_gone_and_nothing_is_kept(llama: Any, observed: Observed) -> None:
    """When a manager and its pool are freed, one CacheGone each follows and no record remains."""
    for _ in range(3):
        answers(llama, prompts(2), greedy(3), pool())
    gc.collect()
    gone = [event.cache_id for event in observed.of(model.CacheGone)]
    assert len(gone) == 3
    assert set(gone) == {event.cache_id for event in observed.of(model.Blocks)}
    events = observed.hooks._events
    assert (events._pools._records, events._pools._ends, events._inner) == ({}, {}, {})
    assert (events._managers._records, events._managers._ends) == ({}, {})


def test_requests_of_a_manager_that_never_ran_are_dropped(llama: Any, observed: Observed) -> None:
    """A manager that goes away with requests in its queue leaves no record, and no turn is made up."""
    manager = llama.init_continuous_batching(generation_config=greedy(3), continuous_batching_config=pool())
    manager.add_request(prompts(1)[0])
    assert len(observed.hooks._events._managers._records) == 1
    del manager
    gc.collect()
    assert observed.hooks._events._managers._records == {}
    assert observed.of(model.Turn) == []


def test_a_hook_that_raises_is_detached(llama: Any, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on with the same tokens; the failure is told once, by name, and in the availability."""
    plain = answers(llama, prompts(3), greedy(8), pool())
    watch = Observed()

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr(watch.hooks._events, "updated", broken)
    before = continuous_api.ContinuousBatchProcessor.update_batch
    watch.hooks.install()
    try:
        assert answers(llama, prompts(3), greedy(8), pool()) == plain
        assert continuous_api.ContinuousBatchProcessor.update_batch is before
        (failure,) = watch.of(model.HookFailed)
        assert failure.hook == "ContinuousBatchProcessor.update_batch"
        (fact,) = watch.hooks.availability()
        assert not fact.available
        assert "ContinuousBatchProcessor.update_batch" in fact.reason
        assert len(watch.of(model.Turn)) == 3
    finally:
        watch.close()


def test_another_engine_is_left_alone_with_a_reason() -> None:
    """A continuous batching without the hook points (5.0 to 5.17) is not patched; the availability says why."""
    watch = Observed()
    bare = {name: type(name, (), {}) for name in (
        "ContinuousBatchProcessor", "ContinuousBatchingManager", "PagedAttentionCache", "OffloadingManager",
        "OutputRouter", "RequestState", "ContinuousBatchingIOs", "Scheduler")}
    watch.hooks._patch_all(SimpleNamespace(**bare))
    (fact,) = watch.hooks.availability()
    assert not fact.available
    assert "ContinuousBatchingManager.add_request" in fact.reason
    assert fact.reason.endswith(".")
    assert "add_request" not in vars(bare["ContinuousBatchingManager"])
    watch.hooks._patch_all(SimpleNamespace())
    (fact,) = watch.hooks.availability()
    assert not fact.available
    watch.close()
