"""Roles and ranks of vLLM's processes, and what vLLM says of its engines."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from kvobs.catalog import BY_NAME
from kvobs.model import Event, ProcessRole
from kvobs.sources.vllm._roles import Roles, api_server, replica, worker
from kvobs.sources.vllm._statistics import Statistics


def parallel(**values: int) -> Any:
    return SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_rank": 0,
                              "data_parallel_index": 0} | values)


def test_workers_are_numbered_by_stage_then_context_then_slice() -> None:
    """The ranks of all workers are the cells of vLLM's layout PP x PCP x TP, in its order."""
    config = parallel(tensor_parallel_size=3, pipeline_parallel_size=2, prefill_context_parallel_size=2,
                      data_parallel_index=5)
    for rank, (stage, context, part) in enumerate(itertools.product(range(2), range(2), range(3))):
        assert dict(worker(config, rank)) == {"dp": 5, "tp": part, "pp": stage, "pcp": context}
    assert worker(parallel(tensor_parallel_size=2), 1) == (("dp", 0), ("tp", 1), ("pp", 0))


def test_replicas_and_api_servers_are_numbered() -> None:
    """An engine core has the index of its replica (also of independent ones); one API server alone has no number."""
    assert replica(parallel(data_parallel_rank=0, data_parallel_index=3)) == (("dp", 3),)
    older = parallel(data_parallel_rank=2)
    del older.data_parallel_index
    assert replica(older) == (("dp", 2),)
    assert api_server(parallel()) == ()
    assert api_server(parallel(_api_process_count=4, _api_process_rank=2)) == (("api", 2),)
    assert api_server(parallel(_api_process_count=4, _api_process_rank=-1)) == ()


def test_a_process_that_is_several_things_is_called_by_the_foremost() -> None:
    """An engine in process is an engine core, in whatever order its parts are made; a change is told once."""
    for order in itertools.permutations([("worker", (("tp", 0),)), ("engine_core", (("dp", 0),)), ("llm", ())]):
        told: list[Event] = []
        roles = Roles(told.append, lambda: 7)
        for role, ranks in order:
            roles.found(role, ranks)
            roles.found(role, ranks)
        assert roles.told == ProcessRole(7, "vllm", "engine_core", (("dp", 0),))
        assert told[-1] == roles.told
        assert len(told) == len({event.role for event in told if isinstance(event, ProcessRole)})


def test_a_forked_child_is_not_what_its_parent_is() -> None:
    """A child has no role until it is seen to have one."""
    roles = Roles(lambda event: None)
    roles.found("api_server", ())
    roles.after_fork_in_child()
    assert roles.told is None
    roles.found("worker", (("tp", 1),))
    assert roles.told is not None
    assert roles.told.role == "worker"


class Clock:
    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


def scheduler(running: int, waiting: int, queries: int, hits: int, **more: Any) -> Any:
    return SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=running / 10,
                           prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits), **more)


def iteration(prompt: int, generation: int, preempted: int, *outcomes: str) -> Any:
    return SimpleNamespace(num_prompt_tokens=prompt, num_generation_tokens=generation, num_preempted_reqs=preempted,
                           finished_requests=[SimpleNamespace(finish_reason=outcome) for outcome in outcomes])


def test_counts_add_up_and_states_are_the_latest() -> None:
    """What vLLM says per step is summed, what it says of now is its latest word, with its age."""
    clock = Clock()
    said = Statistics("m", 3, clock)
    assert said.readings() == []
    said.blocks(24)
    said.record(scheduler(1, 2, 50, 10, num_skipped_waiting_reqs=4), iteration(50, 1, 0))
    said.record(None, iteration(0, 8, 2, "stop", "length"))
    clock.ns = 2_000_000_000
    said.record(scheduler(3, 1, 7, 7, num_skipped_waiting_reqs=0), iteration(7, 3, 0, "stop"))
    clock.ns = 5_000_000_000
    who = ("vllm", "in-process", "m", "dp=3")
    found = {(name, attributes): value for name, attributes, value in said.readings()}
    assert found == {
        ("kvobs.engine.age", ("in-process",)): 3.0,
        ("kvobs.engine.kv.utilization", (*who, "device")): 0.3,
        ("kvobs.engine.kv.blocks", (*who, "device")): 24,
        ("kvobs.engine.requests", (*who, "running")): 3,
        ("kvobs.engine.requests", (*who, "waiting")): 1,
        ("kvobs.engine.waiting", (*who, "capacity")): 1,
        ("kvobs.engine.waiting", (*who, "deferred")): 0,
        ("kvobs.engine.preemptions", who): 2,
        ("kvobs.engine.tokens", (*who, "prompt")): 57,
        ("kvobs.engine.tokens", (*who, "generation")): 12,
        ("kvobs.engine.prefix.queried", (*who, "device")): 57,
        ("kvobs.engine.prefix.hit", (*who, "device")): 17,
        ("kvobs.engine.finished", (*who, "stop")): 2,
        ("kvobs.engine.finished", (*who, "length")): 1,
    }
    for name, attributes in found:
        assert len(attributes) == len(BY_NAME[name].attributes)


def test_an_engine_that_has_told_everything_has_no_age() -> None:
    """While nobody runs or waits by the latest word no age grows; with the next request it is there again."""
    clock = Clock()
    said = Statistics("m", 0, clock)
    ages = []
    for word in (scheduler(1, 0, 0, 0), scheduler(0, 0, 0, 0), scheduler(0, 1, 0, 0),
                 scheduler(0, 0, 0, 0, num_skipped_waiting_reqs=1), scheduler(0, 0, 0, 0, num_skipped_waiting_reqs=0)):
        said.record(word, None)
        clock.ns += 2_000_000_000
        ages.append([value for name, _, value in said.readings() if name == "kvobs.engine.age"])
    assert ages == [[2.0], [], [2.0], [2.0], []]
    idle = {(name, attributes[-1]): value for name, attributes, value in said.readings()}
    assert idle["kvobs.engine.requests", "running"] == idle["kvobs.engine.requests", "waiting"] == 0


def test_what_a_version_does_not_say_has_no_reading() -> None:
    """A field that vLLM's statistics lack is absent, not zero."""
    said = Statistics("m", 0, Clock())
    said.record(SimpleNamespace(num_waiting_reqs=5), SimpleNamespace())
    assert {(name, attributes[-1]) for name, attributes, _ in said.readings()} == {
        ("kvobs.engine.age", "in-process"), ("kvobs.engine.requests", "waiting"), ("kvobs.engine.waiting", "capacity")}
