"""Continuous batching of transformers against an independent ledger, closed forms and its own results."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers", reason="transformers is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                    reason="This transformers is older than 5.18; kvobs follows its continuous batching from there on.")
sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install 'kvobs[otel]' brings the SDK.")

from transformers import (
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching import offloading_manager as offloading

from kvobs import model
from tests.contract import paged
from tests.contract.paged import (
    BLOCK_BYTES,
    HEAD_DIM,
    KV_HEADS,
    PAGE,
    SMALL_POOL,
    TOKEN_BYTES,
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
