"""Gauges and counters of serving engines against sums by hand."""

from __future__ import annotations

from kvobs import model
from kvobs.metrics import Attributes, Metrics, Value

ORIGIN = model.Origin("vllm", "tiny", "BlockPool", "cpu", "bfloat16")
WHO = ("tiny", "cpu", "BlockPool")


def folded(*events: model.Event) -> dict[str, dict[Attributes, Value]]:
    metrics = Metrics()
    metrics.fold(events)
    metrics.refresh(1)
    return {row.name: points for row, points in metrics.collect()}


def test_a_pool_that_lacks_blocks_does_not_hide_one_that_has_too_many() -> None:
    """What no state explains adds up without its sign: two wrong pools are no sound one."""
    found = folded(model.PoolWork(1, ORIGIN, 1, unexplained=-3), model.PoolWork(1, ORIGIN, 2, unexplained=3))
    assert found["kvobs.kv.unexplained"] == {WHO: 6}


def test_counts_of_a_pool_grow_by_what_was_added_since_the_last_word() -> None:
    """Two words on a pool and one on another add up to their last ones; what was told first begins at its own value."""
    found = folded(model.PoolWork(1, ORIGIN, 1, evictions=2, hit_tokens=64, queried_tokens=100),
                   model.PoolWork(2, ORIGIN, 1, evictions=5, hit_tokens=64, queried_tokens=180),
                   model.PoolWork(2, ORIGIN, 2, evictions=4, queried_tokens=1))
    assert found["kvobs.kv.block.evictions"] == {(*WHO, "pressure"): 9, (*WHO, "dropped"): 0}
    assert found["kvobs.prefix.queried"][*WHO, "first"] == 181
    assert found["kvobs.prefix.hit"][*WHO, "first"] == 64


def test_states_of_requests_are_the_last_word_and_go_with_their_pool() -> None:
    """Requests, slots and the next one's needs are of the newest word; a pool that is gone has none."""
    def states(t_ns: int, waiting: int, needs: int | None) -> model.RequestStates:
        return model.RequestStates(t_ns, ORIGIN, 1, 4096, 8, (("running", "", 3), ("waiting", "blocks", waiting)), (),
                                   waiting + 3, "r" if needs else "", needs, "WAIT" if needs else "")

    found = folded(states(1, 5, 4), states(2, 2, 3))
    assert found["kvobs.requests"] == {("tiny", "running", ""): 3, ("tiny", "waiting", "blocks"): 2,
                                       ("tiny", "waiting", ""): 0, ("tiny", "preempted", ""): 0}
    assert found["kvobs.request.slots"] == {("tiny",): 8}
    assert found["kvobs.request.next"] == {("tiny", "WAIT"): 3}
    gone = folded(states(1, 5, 4), model.CacheGone(2, 1))
    assert not {"kvobs.requests", "kvobs.request.slots", "kvobs.request.next"} & gone.keys()


def test_what_a_preempted_request_lost_is_told_by_cause() -> None:
    """Tokens lost add up by cause, and the process's role is its latest word."""
    def lost(cause: str, tokens: int) -> model.Preemption:
        return model.Preemption(1, ORIGIN, 1, "r", "s", cause, "", tokens, 2, ())

    found = folded(lost("blocks", 96), lost("reset", 32), lost("blocks", 4), model.ProcessRole(1, "vllm", "llm", ()),
                   model.ProcessRole(2, "vllm", "worker", (("dp", 0), ("tp", 1))))
    assert found["kvobs.kv.preemption.tokens"] == {(*WHO, "blocks"): 100, (*WHO, "reset"): 32}
    assert found["kvobs.process.role"] == {("vllm", "worker", "dp=0 tp=1"): 1}
