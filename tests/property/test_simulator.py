"""Conservation laws of the modelled server over random loads, servers and policies; readers over random text."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.breaker import Leaf, Level, Policy
from kvobs.breaker.simulator import Request, Server, Trace, TraceError, read_trace, simulate
from kvobs.breaker.simulator._engine import Engine, Job
from kvobs.breaker.simulator._gate import SHEDDABLE, priority

SECOND = 10**9


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request whose chunks (of 16 or 32 tokens) are a path down a small tree, so that prefixes are shared."""
    prompt, output = draw(st.integers(1, 120)), draw(st.integers(1, 60))
    path, chunks = 0, []
    for turn in draw(st.lists(st.integers(1, 2), max_size=(prompt + output) // 32)):
        path = path * 3 + turn
        chunks.append(path)
    return Request(draw(st.integers(0, 20 * SECOND)), prompt, output, tuple(chunks))


servers = st.builds(
    Server, blocks=st.integers(2, 40), slots=st.integers(1, 6), budget=st.integers(1, 100),
    step_s=st.sampled_from([0.01, 0.3]), token_s=st.sampled_from([0.0, 0.01]), host_blocks=st.integers(0, 30),
    guess_tokens=st.integers(1, 80), clamp_tokens=st.integers(1, 20), retries=st.integers(0, 3),
    retry_s=st.sampled_from([0.1, 2.0]), ttft_s=st.sampled_from([0.1, 2.0]), tpot_s=st.sampled_from([0.02, 0.5]))
loads = st.lists(requests(), min_size=1, max_size=12)
CHUNKS = st.sampled_from([16, 32])


@settings(max_examples=100)
@given(loads, servers, CHUNKS, st.integers(0, 10**6))
def test_blocks_and_tokens_are_conserved(load: list[Request], server: Server, chunk: int, seed: int) -> None:
    """Before and after every step, blocks that requests hold (counted from the requests), cached and free ones are the
    pool; every request ends exactly once; tokens computed are tokens kept and tokens computed again.
    """
    engine = Engine(server, chunk)
    jobs = [Job(number, one, one.output, 0) for number, one in enumerate(load)]
    coming, now, ended, draw = list(jobs), 0, [], random.Random(seed)
    while coming or engine.busy:
        for _ in range(draw.randint(0 if engine.busy else 1, 3)):
            if coming:
                engine.arrive(coming.pop(0))
        engine.careful, engine.pool.offloading = draw.random() < 0.5, draw.random() < 0.5
        if engine.pool.offloading:
            engine.pool.offload(now - SECOND)
        lasts = engine.schedule(now)
        _check(engine)
        if lasts is not None:
            now += lasts
            engine.complete(now)
            _check(engine)
        ended += engine.ended
        engine.ended.clear()
    assert sorted(job.number for job in ended) == list(range(len(load)))
    assert engine.pool.used == 0
    assert engine.computed == sum(job.high - job.hit for job in jobs) + engine.recomputed
    for job in jobs:
        if job.outcome == "ok":
            assert job.generated == job.output
            assert job.high == job.prompt + job.generated - 1
        else:  # what it needed more blocks than there are for
            assert -(-(job.prompt + job.output - 1) // 16) > server.blocks


def _check(engine: Engine) -> None:
    pool = engine.pool
    own = sum(job.blocks - len(job.held) * pool.chunk_blocks for job in engine.running)
    shared = {chunk for job in engine.running for chunk in job.held}
    assert own + len(shared) * pool.chunk_blocks + pool.cached + pool.free == pool.size
    assert min(pool.cached, pool.free, own) >= 0
    assert len(engine.running) <= engine.server.slots
    assert sum(job.now for job in engine._step) <= engine.server.budget
    assert engine._context == sum(job.computed for job in engine.running)
    for job in engine.running:
        assert job.computed <= job.room
    for job in engine.waiting:
        assert job.room == 0
        assert not job.held


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any policy on signals of the model, with short times."""
    def leaf() -> Leaf:
        signal = draw(st.sampled_from(["waiting", "kv_utilization", "preemption_rate", "headroom", "pool_verdict"]))
        if signal == "pool_verdict":
            return Leaf(signal=signal, one_of=("WAIT", "RECLAIM"))
        threshold = draw(st.sampled_from([-1.0, 0.1, 0.5, 2.0]))
        fields: dict[str, Any] = {draw(st.sampled_from(["above", "below"])): threshold}
        return Leaf(signal=signal, for_s=draw(st.sampled_from([0.0, 1.0])), **fields)

    levels = tuple(Level(condition=leaf(), open_s=0.5, closed_s=0.5, half_open_s=1.0, longest_open_s=2.0)
                   for _ in range(3))
    return Policy(name="any", levels=levels, escalate_s=draw(st.sampled_from([0.0, 1.0])), transitions=100)


@settings(max_examples=100)
@given(loads, servers, CHUNKS, st.one_of(st.none(), policies()), st.integers(0, 3))
def test_every_request_ends_once_whatever_the_policy(load: list[Request], server: Server, chunk: int,
                                                     policy: Policy | None, seed: int) -> None:
    """Requests end finished, cut, refused or out of memory; only sheddable ones are refused and only normal ones cut,
    to the clamp; nobody is faster than the server alone; tokens are conserved.
    """
    load = sorted(load, key=lambda one: one.arrival_ns)
    run = simulate(Trace("any", tuple(load), chunk), server, policy, seed=seed)
    assert [one.number for one in run.ended] == list(range(len(load)))
    for one, asked in zip(run.ended, load, strict=True):
        rank = priority(server, seed, one.number)
        if one.outcome == "refused":
            assert (rank, one.generated, one.refusals) == (SHEDDABLE, 0, server.retries + 1)
            continue
        assert one.refusals <= server.retries * (rank == SHEDDABLE)
        if one.outcome == "cut":
            assert one.generated == server.clamp_tokens < asked.output
            assert policy is not None
        elif one.outcome == "ok":
            assert one.generated == asked.output
        if one.ttft_ns is not None:
            steps = -(-(asked.prompt - one.hit) // server.budget)
            alone = steps * server.step_s + (asked.prompt - one.hit) * server.token_s
            assert one.ttft_ns >= alone * SECOND - 1_000
        if one.outcome in ("ok", "cut"):
            assert one.computed == asked.prompt + one.generated - 1
    assert run.computed == sum(one.computed - one.hit for one in run.ended) + run.recomputed
    assert sum(one.preemptions for one in run.ended) == run.preemptions
    assert len(run.level_s) == (4 if policy is not None else 0)


texts = st.one_of(
    st.text(max_size=200), st.binary(max_size=200),
    st.lists(st.text(alphabet="0123456789-:. ,\"e\n", max_size=40), max_size=5).map(
        lambda rows: "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows)),
    st.lists(st.dictionaries(st.sampled_from(["timestamp", "input_length", "output_length", "hash_ids"]), st.one_of(
        st.integers(-5, 10**20), st.floats(), st.none(), st.lists(st.integers(), max_size=3))), max_size=4).map(
        lambda rows: "\n".join(str(row).replace("'", '"') for row in rows)))


@settings(max_examples=200)
@given(text=texts)
def test_any_text_is_a_trace_or_one_sentence(text: str | bytes, tmp_path_factory: Any) -> None:
    """Whatever is in a file, it is read within its bounds, or refused in one sentence."""
    path: Path = tmp_path_factory.mktemp("t") / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
    with contextlib.suppress(TraceError):
        trace = read_trace(path)
        assert trace.requests
        assert all(one.prompt >= 1 and one.output >= 1 for one in trace.requests)
        assert trace.requests[0].arrival_ns == 0
