"""The model engine on cases that are worked out by hand."""

from __future__ import annotations

import pytest

from kvobs.breaker.simulator import Request, Server, Trace, simulate
from kvobs.breaker.simulator._engine import OK, Engine, Job
from kvobs.breaker.simulator._pool import Pool

SECOND = 10**9
TINY = Server(blocks=4, slots=2, budget=32, step_s=1.0, token_s=0.01, context_s=0.0, host_s=0.5, host_blocks=8)


def seconds(ns: int | None) -> float:
    assert ns is not None
    return ns / SECOND


def test_two_requests_and_a_preemption_by_hand() -> None:
    """Four blocks of 16 hold two requests of 20 + 20 tokens until the first needs its third block.

    Steps: 32 tokens (20 of A, 12 of B), 9 (1, 8), eleven of 2, then A takes a block of B, who is preempted with 31
    tokens computed and 12 generated; A alone for 7 steps while B is refused in 6 of them; B again with 32 tokens of
    prompt, and 7 steps of 1.
    """
    run = simulate(Trace("tiny", (Request(0, 20, 20), Request(0, 20, 20)), 16), TINY, None)
    a, b = run.ended
    assert seconds(a.ttft_ns) == pytest.approx(1.32)
    assert seconds(b.ttft_ns) == pytest.approx(1.32 + 1.09)
    a_ends = 1.32 + 1.09 + 11 * 1.02 + 7 * 1.01
    assert seconds(a.tpot_ns) == pytest.approx((a_ends - 1.32) / 19)
    assert seconds(run.duration_ns) == pytest.approx(a_ends + 1.32 + 7 * 1.01)
    assert (run.preemptions, run.failures, run.recomputed, run.computed) == (1, 7, 31, 39 + 39 + 31)
    assert [(one.outcome, one.generated, one.preemptions) for one in run.ended] == [("ok", 20, 0), ("ok", 20, 1)]


def test_who_is_preempted_is_served_before_those_who_wait() -> None:
    """A third request that waits while the second is preempted begins once that has ended, and takes two steps."""
    run = simulate(Trace("tiny", (Request(0, 20, 20), Request(0, 20, 20), Request(SECOND, 40, 20)), 16), TINY, None)
    assert [one.preemptions for one in run.ended] == [0, 1, 0]
    second_ends = 1.32 + 1.09 + 11 * 1.02 + 7 * 1.01 + 1.32 + 7 * 1.01
    assert seconds(run.ended[2].ttft_ns) == pytest.approx(second_ends + 1.32 + 1.08 - 1)


def test_a_prefix_is_found_by_whole_chunks() -> None:
    """After 40 tokens with chunks of 16 named 7 and 8, another with the same two computes only what lies behind."""
    run = simulate(Trace("two", (Request(0, 40, 1, (7, 8)), Request(10 * SECOND, 40, 1, (7, 8))), 16), TINY, None)
    assert [one.hit for one in run.ended] == [0, 32]
    assert (run.computed, run.hits, run.queried) == (48, 32, 80)
    assert [seconds(one.ttft_ns) for one in run.ended] == pytest.approx([1.32 + 1.08, 1.08])


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """Where the whole prompt is cached, its last chunk is computed again, since the next token comes of it."""
    run = simulate(Trace("two", (Request(0, 32, 1, (7, 8)), Request(10 * SECOND, 32, 1, (7, 8))), 16), TINY, None)
    assert [one.hit for one in run.ended] == [0, 16]


def test_a_request_beyond_the_pool_ends_out_of_memory() -> None:
    """64 tokens fit four blocks: a prompt of 65 and an output that grows beyond end so, and others do not."""
    loads = (Request(0, 65, 1), Request(0, 60, 6), Request(0, 60, 5))
    run = simulate(Trace("large", loads, 16), TINY, None)
    assert [one.outcome for one in run.ended] == ["out_of_memory", "out_of_memory", "ok"]
    assert [one.generated for one in run.ended] == [0, 5, 5]


def test_a_step_reads_the_context() -> None:
    """With a price on KV alone, a step costs what lies before it and in it."""
    server = Server(blocks=10, budget=100, step_s=0.0, token_s=0.0, context_s=0.001)
    run = simulate(Trace("one", (Request(0, 10, 3),), 16), server, None)
    assert seconds(run.duration_ns) == pytest.approx(0.010 + 0.011 + 0.012)


def test_careful_admission_waits_for_what_is_expected_to_fit() -> None:
    """With an expected output of 20 tokens, two requests of 20 need 3 blocks each: level 1 runs them one by one."""
    server = Server(blocks=4, slots=2, budget=32, guess_tokens=20)
    engine = Engine(server, 16)
    engine.careful = True
    jobs = [Job(number, Request(0, 20, 20), 20, 0) for number in range(2)]
    for job in jobs:
        engine.arrive(job)
    now = 0
    together = 0
    while engine.busy:
        now += engine.schedule(now) or 0
        together = max(together, len(engine.running))
        engine.complete(now)
    assert together == 1
    assert engine.preemptions == 0
    assert [job.outcome for job in jobs] == [OK, OK]


def test_the_least_recently_held_chunk_is_evicted_first() -> None:
    """Of two cached chunks the one that was let go first is evicted, and of one request its last."""
    pool = Pool(4, 1, 0)
    for chunk in (1, 2, 3):
        assert pool.take(1)
        assert pool.register(chunk)
    pool.let_go([1, 2], 10)
    pool.let_go([3], 20)
    assert (pool.used, pool.cached, pool.free) == (0, 3, 1)
    assert pool.take(2)
    assert pool.found([2], 1) == (0, 0, 0)
    assert pool.found([1], 1) == (1, 1, 0)
    assert not pool.take(3)
    assert (pool.used, pool.cached, pool.free, pool.evictions) == (2, 2, 0, 1)


def test_offloaded_chunks_come_back_at_a_price() -> None:
    """Level 2 moves what nobody held for a while to the host: it is found there, takes blocks, and costs time."""
    engine = Engine(TINY, 16)
    first = Job(0, Request(0, 33, 1, (7, 8)), 1, 0)
    engine.arrive(first)
    now = 0
    while engine.busy:
        now += engine.schedule(now) or 0
        engine.complete(now)
    engine.pool.offloading = True
    engine.pool.offload(now - 1)
    assert engine.pool.cached == 2  # held too recently
    engine.pool.offload(now)
    assert (engine.pool.cached, engine.pool.free, engine.pool.offloaded) == (0, 4, 2)
    again = Job(1, Request(0, 33, 1, (7, 8)), 1, now)
    engine.arrive(again)
    assert engine.next_verdict() == (3, "SERVED")
    assert engine.schedule(now) == round((1.0 + 0.01 * 1 + 2 * 0.5) * SECOND)
    assert (again.hit, engine.pool.fetched, engine.pool.used) == (32, 2, 3)


def test_a_full_host_forgets_what_it_got_first() -> None:
    """A host of one chunk keeps the one that came last; one without room takes none."""
    pool = Pool(4, 1, 1)
    pool.offloading = True
    for chunk in (1, 2):
        pool.take(1)
        pool.register(chunk)
        pool.let_go([chunk], chunk)
    pool.offload(9)
    assert [pool.found([chunk], 1) for chunk in (1, 2)] == [(0, 0, 0), (1, 0, 1)]
    none = Pool(4, 1, 0)
    none.take(1)
    none.register(1)
    none.let_go([1], 0)
    none.offload(9)
    assert none.cached == 1


@pytest.mark.parametrize(("tokens", "verdict"), [(16, "SERVED"), (48, "RECLAIM"), (64, "WAIT"), (65, "CAPACITY")])
def test_the_next_request_gets_the_verdict_of_a_paged_pool(tokens: int, verdict: str) -> None:
    """With one block used, two cached and one free, 1, 3, 4 and 5 blocks are each verdict once."""
    engine = Engine(TINY, 16)
    engine.pool.take(3)
    engine.pool.register(1)
    engine.pool.register(2)
    engine.pool.let_go([1, 2], 0)
    engine.arrive(Job(0, Request(0, tokens, 1), 1, 0))
    found = engine.next_verdict()
    assert found == (-(-tokens // 16), verdict)
