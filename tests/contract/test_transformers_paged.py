"""Continuous batching of transformers against an independent ledger, closed forms and its own results."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers", reason="transformers is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                    reason="This transformers is older than 5.18; kvobs follows its continuous batching from there on.")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'kvobs[otel]' brings the SDK.")

from opentelemetry import context, trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.continuous_batching import cache_allocators, continuous_api
from transformers.generation.continuous_batching import offloading_manager as offloading

from kvobs import metrics, model, sessions
from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.sources import Wiring
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._paged import PagedHooks
from tests.support import wait_until

pytestmark = pytest.mark.torch

LAYERS, KV_HEADS, HEAD_DIM, PAGE = 3, 2, 8, 16
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
BLOCK_BYTES = PAGE * TOKEN_BYTES
SMALL_POOL = 10


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=97, max_position_embeddings=512))
    made.set_attn_implementation("sdpa")
    return made.eval()


@dataclass
class Ledger:
    """Counted beside kvobs, from the pool's own methods; patched in before kvobs is."""

    allocated: int = 0
    refused: int = 0
    reset: int = 0
    copied_bytes: int = 0
    totals: set[int] = field(default_factory=set)
    after_step: list[int] = field(default_factory=list)
    after_update: list[tuple[int, int, int]] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)


def used_bytes(cache: Any) -> int:
    return sum(len({block for table in a.block_table.values() for block in table}) * a.bytes_per_block
               for a in cache.cache_allocators.values())


def free_bytes(cache: Any) -> int:
    return cache.pool.num_free_sectors * cache.bytes_per_sector + sum(
        cache.pool.count_free_blocks(a.index) * a.bytes_per_block for a in cache.cache_allocators.values())


def cached_bytes(cache: Any) -> int:
    return sum(len(a.ledger.cached_blocks) * a.bytes_per_block for a in cache.cache_allocators.values())


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    seen = Ledger()

    def beside(owner: Any, name: str, see: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            see(self, result, *args)
            return result

        monkeypatch.setattr(owner, name, call)

    def took(pool: Any, blocks: list[int], *_: object) -> None:
        seen.allocated += len(blocks)

    def asked(cache: Any, fits: bool, *_: object) -> None:
        seen.refused += not fits

    def restarted(state: Any, *_: object) -> None:
        seen.reset += 1

    def copied(allocator: Any, _: None, source: list[int], *__: object) -> None:
        seen.copied_bytes += len(source) * allocator.bytes_per_block

    def stepped(processor: Any, *_: object) -> None:
        seen.after_step.append(used_bytes(processor.cache))
        seen.batches.append([future.query_length for future in processor.inputs_and_outputs.requests_in_batch])

    def updated(processor: Any, *_: object) -> None:
        cache = processor.cache
        seen.totals.add(cache.num_sectors * cache.bytes_per_sector)
        seen.after_update.append((used_bytes(cache), cached_bytes(cache), free_bytes(cache)))

    beside(cache_allocators.CachePool, "get_free_blocks", took)
    beside(continuous_api.PagedAttentionCache, "can_store_request_tokens", asked)
    beside(continuous_api.RequestState, "create_equivalent_initial_request", restarted)
    beside(cache_allocators.CacheAllocator, "copy_blocks", copied)
    beside(continuous_api.ContinuousBatchProcessor, "_generation_step", stepped)
    beside(continuous_api.ContinuousBatchProcessor, "update_batch", updated)
    return seen


class Observed:
    """Paged hooks on their own, what they emitted, and the spans they ended."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.tracer = provider.get_tracer("test")
        self.bus = Bus(1_000_000)
        self.patches = Patches("transformers", self.bus.publish)
        self.hooks = PagedHooks(Wiring(Config(), self.bus, lambda: self.tracer), self.bus.publish, self.patches,
                                sessions.Names("plain"), sessions.TurnNumbers())
        self._seen: list[model.Event] = []

    def of(self, kind: type) -> list[Any]:
        self._seen += self.bus.drain()
        return [event for event in self._seen if type(event) is kind]

    def all(self) -> list[model.Event]:
        self._seen += self.bus.drain()
        return list(self._seen)

    def close(self) -> None:
        self.hooks.uninstall()
        self.patches.restore()


@pytest.fixture
def observed(ledger: Ledger) -> Iterator[Observed]:
    made = Observed()
    made.hooks.install()
    yield made
    made.close()
    assert not made.of(model.HookFailed)


def prompts(number: int = 5, length: int = 20) -> list[list[int]]:
    return [[(7 * row + column) % 97 for column in range(length)] for row in range(number)]


def greedy(new_tokens: int = 24, **more: Any) -> Any:
    return GenerationConfig(**{"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": -1} | more)


def pool(blocks: int = 64, **more: Any) -> Any:
    return ContinuousBatchingConfig(**{"page_size": PAGE, "num_blocks": blocks, "max_batch_tokens": 64} | more)


def answers(network: Any, inputs: list[list[int]], generation: Any, batching: Any) -> dict[str, list[int]]:
    found = network.generate_batch(inputs, generation_config=generation, continuous_batching_config=batching)
    return {name: output.generated_tokens for name, output in found.items()}


def stopped(manager: Any) -> None:
    manager.stop(block=True, timeout=30)


# -- the ledger ------------------------------------------------------------------------------------------


def test_steps_and_blocks_are_the_engines_ledger(llama: Any, ledger: Ledger, observed: Observed) -> None:
    """With a pool too small for its requests, every step and every block equals an independent count."""
    answers(llama, prompts(), greedy(), pool(SMALL_POOL))
    steps, blocks = observed.of(model.Step), observed.of(model.Blocks)
    assert [step.tokens for step in steps] == [sum(batch) for batch in ledger.batches]
    assert [step.prefill for step in steps] == [max(batch) > 1 for batch in ledger.batches]
    assert [step.kv_bytes for step in steps] == ledger.after_step
    assert [step.bytes_written for step in steps] == [sum(batch) * TOKEN_BYTES for batch in ledger.batches]
    assert {step.kv_reserved_bytes for step in steps} == {(SMALL_POOL + 2) * BLOCK_BYTES}  # two sectors for padding
    assert {step.kv_largest_bytes for step in steps} == {(SMALL_POOL + 2) * BLOCK_BYTES}
    assert {step.reallocations for step in steps} == {0}
    assert all(step.hook_ns > 0 for step in steps)
    assert {event.block_bytes for event in blocks} == {BLOCK_BYTES}
    in_blocks = [tuple(part // BLOCK_BYTES for part in parts) for parts in ledger.after_update]
    assert [(event.used, event.cached, event.free) for event in blocks] == in_blocks
    assert {event.used + event.cached + event.free for event in blocks} == {SMALL_POOL}
    last = blocks[-1]
    assert ledger.reset > 0
    assert ledger.refused > 0
    assert (last.allocations, last.failures, last.preemptions) == (ledger.allocated, ledger.refused, ledger.reset)


def test_groups_of_different_block_sizes_are_counted_in_one_unit(ledger: Ledger, observed: Observed) -> None:
    """A model with full and sliding layers: blocks of both groups in a unit that divides both, sums conserved."""
    torch.manual_seed(0)
    network = Qwen3ForCausalLM(Qwen3Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, vocab_size=97, max_position_embeddings=512, use_sliding_window=True, sliding_window=32,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]))
    network.set_attn_implementation("sdpa")
    answers(network.eval(), prompts(), greedy(), pool(6))
    page = 2 * KV_HEADS * HEAD_DIM * 4 * PAGE  # one layer's; the groups' blocks are one and three of it
    steps, blocks = observed.of(model.Step), observed.of(model.Blocks)
    assert {event.block_bytes for event in blocks} == {page}
    assert [(e.used * page, e.cached * page, e.free * page) for e in blocks] == ledger.after_update
    assert {(e.used + e.cached + e.free) * page for e in blocks} == ledger.totals
    assert [step.kv_bytes for step in steps] == ledger.after_step
    assert [step.bytes_written for step in steps] == [sum(batch) * 4 * page // PAGE for batch in ledger.batches]


def test_turns_add_up_to_steps(llama: Any, observed: Observed) -> None:
    """What requests wrote and took part in is what the steps computed; prompt and new tokens are the caller's."""
    found = answers(llama, prompts(), greedy(), pool(SMALL_POOL))
    turns, steps = observed.of(model.Turn), observed.of(model.Step)
    assert sorted(turn.session for turn in turns) == sorted(found)
    assert sum(turn.bytes_written for turn in turns) == sum(step.bytes_written for step in steps)
    for turn in turns:
        assert (turn.outcome, turn.turn, turn.priority, turn.cached_tokens) == ("ok", 1, "normal", 0)
        assert (turn.prompt_tokens, turn.new_tokens) == (20, len(found[turn.session])) == (20, 24)
        # 43 positions are stored (the last new token never is): 3 blocks of 16.
        assert turn.kv_bytes == 3 * BLOCK_BYTES
        assert turn.steps >= 24
        assert turn.ttft_ns is not None
        assert turn.tpot_ns is not None
        assert turn.ttft_ns + 23 * turn.tpot_ns <= turn.t_ns - turn.start_ns
    assert sum(turn.steps for turn in turns) > 5 * 24  # preempted requests compute their prompts again


def test_observed_generation_gives_the_same_tokens(llama: Any) -> None:
    """Token for token the same with and without kvobs, and every patched object is back afterwards."""
    plain = answers(llama, prompts(), greedy(), pool(SMALL_POOL))
    watch = Observed()
    points = [(owner, name) for owner, name, _ in watch.hooks._points(continuous_api)]
    before = [vars(owner).get(name) for owner, name in points]
    watch.hooks.install()
    assert [vars(owner).get(name) for owner, name in points] != before
    assert watch.hooks.availability() == [model.Availability("continuous batching", True, "")]
    try:
        assert answers(llama, prompts(), greedy(), pool(SMALL_POOL)) == plain
    finally:
        watch.close()
    assert all(vars(owner).get(name) is value for (owner, name), value in zip(points, before, strict=True))
    assert answers(llama, prompts(), greedy(), pool(SMALL_POOL)) == plain


def test_an_inactive_bus_sees_nothing(llama: Any, observed: Observed) -> None:
    """While kvobs is off its wrappers pass through: no event, no span."""
    observed.bus.active = False
    answers(llama, prompts(2), greedy(4), pool())
    assert observed.all() == []
    assert observed.spans.get_finished_spans() == ()


# -- prefixes, forks, swap -------------------------------------------------------------------------------


def test_prefix_hits_are_cached_tokens(llama: Any, observed: Observed) -> None:
    """A prompt seen before is served from whole blocks, all but its last token's; the turn says how much."""
    manager = llama.init_continuous_batching(generation_config=greedy(4), continuous_batching_config=pool())
    manager.start()
    prompt = prompts(1, 50)[0]
    for name in ("first", "second"):
        manager.add_request(prompt, request_id=name)
        wait_until(lambda name=name: manager.get_result(name, timeout=1), what="the result")
    stopped(manager)
    first, second = observed.of(model.Turn)
    assert (first.session, first.cached_tokens, first.prompt_tokens) == ("first", 0, 50)
    assert (second.session, second.cached_tokens, second.prompt_tokens) == ("second", 49 // PAGE * PAGE, 50)
    assert second.bytes_written == first.bytes_written - 48 * TOKEN_BYTES


def test_forked_answers_are_turns_and_copies_are_counted(llama: Any, ledger: Ledger, observed: Observed) -> None:
    """Three answers to a prompt are three turns of one number; what the fork copied is in steps and turns."""
    found = answers(llama, prompts(2), greedy(6, num_return_sequences=3, do_sample=True), pool())
    turns = observed.of(model.Turn)
    assert len(found) == 6
    assert sorted(turn.session for turn in turns) == sorted(found)
    assert {(turn.outcome, turn.turn, turn.prompt_tokens, turn.new_tokens) for turn in turns} == {("ok", 1, 20, 6)}
    assert ledger.copied_bytes > 0
    assert sum(step.bytes_copied for step in observed.of(model.Step)) == ledger.copied_bytes
    assert sum(turn.bytes_copied for turn in turns) == ledger.copied_bytes
    forked = [turn for turn in turns if "__child#" in turn.session]
    assert {turn.cached_tokens for turn in forked} == {19}  # all but the prompt's last token came from the parent


def test_swapping_to_the_cpu_is_a_migration(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that give way to a CPU swap pool: bytes out and back are those of the blocks that were copied."""
    # There is no pinned memory without an accelerator; the engine's swap works on plain memory just as well.
    monkeypatch.setattr(offloading, "torch", SimpleNamespace(**vars(torch) | {
        "empty": lambda *size, pin_memory=False, **more: torch.empty(*size, **more)}))
    monkeypatch.setattr(offloading, "is_psutil_available", lambda: False)
    plain = answers(llama, prompts(), greedy(), pool(64))
    moved = {"out": 0, "back": 0}

    def counting(owner: Any, name: str, see: Callable[[Any, Any, Any], None]) -> None:
        original = getattr(owner, name)

        def call(self: Any, argument: Any, *rest: Any) -> Any:
            before = {key: {n: len(b) for n, b in blocks.items()}
                      for key, blocks in self._request_id_to_cpu_blocks.items()}
            result = original(self, argument, *rest)
            after = self._request_id_to_cpu_blocks
            see(self, before, after)
            return result

        monkeypatch.setattr(owner, name, call)

    def size(manager: Any, blocks: dict[str, int]) -> int:
        return sum(n * manager.cache.cache_allocators[name].bytes_per_block for name, n in blocks.items())

    def out(manager: Any, before: Any, after: Any) -> None:
        moved["out"] += sum(size(manager, {n: len(b) for n, b in after[key].items()}) for key in after.keys() - before)

    def back(manager: Any, before: Any, after: Any) -> None:
        moved["back"] += sum(size(manager, before[key]) for key in before.keys() - after)

    counting(offloading.OffloadingManager, "_offload_to_cpu", out)
    counting(offloading.OffloadingManager, "restore_scheduled_requests", back)
    fresh = Observed()
    fresh.hooks.install()  # above the counters
    try:
        assert answers(llama, prompts(), greedy(), pool(SMALL_POOL, cpu_offload_space=0.001)) == plain
    finally:
        fresh.close()
    migrations, turns = fresh.of(model.Migration), fresh.of(model.Turn)
    assert moved["out"] > 0
    assert moved["out"] == moved["back"]
    assert sum(move.bytes for move in migrations) == moved["out"] + moved["back"]
    assert sum(move.buffers for move in migrations) * BLOCK_BYTES == moved["out"] + moved["back"]
    assert all(move.duration_ns is not None and move.duration_ns > 0 for move in migrations)
    assert sum(size for turn in turns for *_, size in turn.migrations) == moved["out"] + moved["back"]
    preempted = max(event.preemptions for event in fresh.of(model.Blocks))
    assert preempted == sum(span.attributes["kvobs.request.preemptions"] for span in fresh.spans.get_finished_spans()
                            if "kvobs.request.preemptions" in (span.attributes or {}))


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
