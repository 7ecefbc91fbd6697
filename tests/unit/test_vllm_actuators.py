"""The actuators of vLLM's schedulers, on a scheduler written for tests: refusals, failures, and the way back."""

from __future__ import annotations

import gc
import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.model import ActionTaken, Order
from kvobs.sources.vllm._actions import MAX_NEW_TOKENS, Actuators, EngineActuator
from tests.vllm_world import Request, Scheduler, State, hot_of

FAR_NS = 10**12


class Scene:
    """A scheduler, its actuator, and what was answered."""

    def __init__(self, scheduler: Any = None) -> None:
        self.answers: list[Any] = []
        self.all = Actuators(self.answers.append)
        self.scheduler = scheduler if scheduler is not None else Scheduler(24, 32)
        self.all.found(self.scheduler, hot_of(self.scheduler))
        self.generation = 0

    @property
    def hands(self) -> EngineActuator:
        return next(iter(self.all))

    def order(self, kind: str, *, undo: bool = False) -> ActionTaken:
        """Order something, come to the safe point, and return the answer."""
        self.generation += 1
        level = next(one.level for one in self.hands.capabilities() if one.kind == kind)
        self.hands.submit(Order(level, kind, self.generation, time.monotonic_ns() + FAR_NS, undo))
        self.all.at(self.scheduler)
        answer: ActionTaken = self.answers.pop()
        assert (answer.kind, answer.undo, answer.generation) == (kind, undo, self.generation)
        return answer

    def arrive(self, request: Request) -> Request:
        self.all.arriving(self.scheduler, request)
        self.scheduler.add([request])
        return request


class Core:
    """An engine core: its scheduler, and the queue that its loop waits for."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.input_queue = scheduler, queue.Queue[Any]()


def test_levels_and_kinds_are_told() -> None:
    """Three kinds of level 1, one of level 2 and one of level 3; all but the reset can be undone."""
    assert [(one.level, one.kind, one.reversible) for one in Scene().hands.capabilities()] == [
        (1, "protect_hot_blocks", True), (1, "prefix_cache_reset", False), (1, "kv_aware_admission", True),
        (2, "pause", True), (3, "clamp_tokens", True)]


def test_plans_say_what_orders_do() -> None:
    """The bytes of a plan are those that the order then frees; a plan without an effect says why, and changes nothing.

    A block of the scheduler written for tests is 2 layers x 1,024 bytes.
    """
    scene = Scene()
    pool = scene.scheduler.kv_cache_manager.block_pool
    for block in pool.blocks[1:6]:
        block.block_hash = b"content"
    assert scene.hands.plan("prefix_cache_reset").bytes == 5 * 2 * 1024
    assert scene.order("prefix_cache_reset").bytes == 5 * 2 * 1024
    assert pool.dropped == 5
    assert scene.order("prefix_cache_reset").bytes == 0
    pool.get_new_blocks(2)
    assert "Requests hold 2 blocks" in scene.hands.plan("prefix_cache_reset").reason
    assert scene.hands.plan("kv_aware_admission").reason == "The pool can hold all requests to their ends."
    assert scene.hands.plan("clamp_tokens").reason == "No request of a sheddable session would be cut."
    assert scene.hands.plan("pause").reason.startswith("No request runs")
    for number in range(8):
        scene.arrive(Request(str(number), 71, 100, priority="sheddable"))
    assert {scene.hands.plan(kind).reason for kind in ("kv_aware_admission", "clamp_tokens")} == {""}
    assert scene.scheduler.max_num_active_reqs == 8
    assert {one.max_tokens for one in scene.scheduler.requests.values()} == {100}


def test_a_limit_that_somebody_else_sets_is_the_one_that_comes_back() -> None:
    """A lower limit of theirs is kept to while ours is in force, and is what undoing restores; a later one stays."""
    scene = Scene()
    for number in range(8):
        scene.arrive(Request(str(number), 71, 100))
    assert scene.order("kv_aware_admission").done
    assert scene.scheduler.max_num_active_reqs == 3
    scene.scheduler.max_num_active_reqs = 2
    scene.arrive(Request("more", 71, 100))
    scene.all.at(scene.scheduler)
    assert scene.scheduler.max_num_active_reqs == 2
    assert scene.order("kv_aware_admission", undo=True).done
    assert scene.scheduler.max_num_active_reqs == 2
    scene.scheduler.max_num_active_reqs = 8
    assert scene.order("kv_aware_admission").done
    scene.scheduler.max_num_active_reqs = 5
    assert scene.order("kv_aware_admission", undo=True).done
    assert scene.scheduler.max_num_active_reqs == 5


def test_what_was_learned_lets_more_in() -> None:
    """Requests that may generate 2,000 tokens but end after 10 are foreseen with 10, once twenty have ended so."""
    scene = Scene(Scheduler(24, 32, slots=8, longest=640))
    for number in range(8):
        scene.arrive(Request(str(number), 60, 2000))
    assert scene.order("kv_aware_admission").done
    assert scene.scheduler.max_num_active_reqs == 1
    for number in range(20):
        short = Request(f"short{number}", 60, 10)
        short.num_output_tokens, short.status.name = 10, "FINISHED_STOPPED"
        scene.all.ended(scene.scheduler, short)
    scene.all.at(scene.scheduler)
    assert scene.scheduler.max_num_active_reqs == 7  # 69 tokens each, a last block with one of them: 3.1 of 23


def test_a_failure_undoes_everything_once(caplog: pytest.LogCaptureFixture) -> None:
    """When the upkeep raises, the engine sees nothing of it: limit and requests are as before, one line says it."""
    scene = Scene()
    sheddable = scene.arrive(Request("s", 71, 100, priority="sheddable"))
    for number in range(8):
        scene.arrive(Request(str(number), 71, 100))
    hands = scene.hands
    assert scene.order("clamp_tokens").done
    assert scene.order("kv_aware_admission").done
    # The clamped one ends first, at 4 x (71 + 63) tokens, and the others go on to 3 x 170; five would not fit.
    assert (sheddable.max_tokens, scene.scheduler.max_num_active_reqs) == (MAX_NEW_TOKENS, 4)
    del scene.scheduler.kv_cache_manager.coordinator
    hands.admission.changes += 1
    for _ in range(3):
        scene.all.at(scene.scheduler)
    assert (sheddable.max_tokens, scene.scheduler.max_num_active_reqs) == (100, 8)
    assert caplog.text.count("the actuator vllm failed (AttributeError") == 1
    hands.submit(Order(1, "kv_aware_admission", 99, FAR_NS))
    assert scene.answers[-1].reason == "vllm is not observed any more."


def test_an_engine_without_the_parts_is_observed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """A scheduler that no actuator can be made for has none; one without a limit or a pause refuses these orders."""
    assert list(Scene(SimpleNamespace()).all) == []
    assert "there is no actuator for vLLM's scheduler" in caplog.text
    bare = Scheduler(24, 32)
    del bare.max_num_active_reqs, bare._pause_state
    scene = Scene(bare)
    assert scene.order("kv_aware_admission").reason.endswith("has no max_num_active_reqs.")
    assert scene.order("pause").reason == "This version of vLLM knows no pause."
    assert vars(bare).keys() & {"max_num_active_reqs", "_pause_state"} == set()


def test_one_replica_of_several_does_not_pause() -> None:
    """Replicas step together, so the order is refused with the reason and the state stays."""
    scene = Scene()
    scene.scheduler.running.append(scene.arrive(Request("r", 10, 10)))
    scene.scheduler.vllm_config.parallel_config.data_parallel_size = 2
    assert "several replicas" in scene.order("pause").reason
    assert scene.scheduler._pause_state == State.UNPAUSED


def test_requests_with_further_input_and_without_sampling_are_left_alone() -> None:
    """Neither a request that takes more input while it runs, nor one of a pooling model, is cut."""
    scene = Scene()
    resumable, pooling = (Request(name, 10, 100, priority="sheddable") for name in ("resumable", "pooling"))
    resumable.resumable = True
    pooling.sampling_params = None
    assert scene.order("clamp_tokens").done
    assert [scene.arrive(one).max_tokens for one in (resumable, pooling)] == [100, 100]


def test_an_order_wakes_the_loop_and_a_dead_scheduler_answers() -> None:
    """The loop's queue gets one message per order; orders for a scheduler that died are answered on the next look."""
    scene = Scene()
    core = Core(scene.scheduler)
    scene.hands.looping(core, "wake")
    assert scene.order("kv_aware_admission").done
    assert core.input_queue.get_nowait() == ("wake", None)
    scene.hands.submit(Order(1, "kv_aware_admission", 99, time.monotonic_ns() + FAR_NS))
    del core
    scene.scheduler = None
    gc.collect()
    assert list(scene.all) == []
    scene.all.expire()
    assert [one.reason for one in scene.answers] == ["vllm is not observed any more."]


def test_names_of_engines_are_used_again() -> None:
    """Engines that live at the same time have names of their own, and the name of one that died is free."""
    scene = Scene()
    second, third = Scheduler(24, 32), Scheduler(24, 32)
    scene.all.found(second, hot_of(second))
    assert [one.name for one in scene.all] == ["vllm", "vllm-2"]
    del second
    gc.collect()
    scene.all.found(third, hot_of(third))
    assert [one.name for one in scene.all] == ["vllm", "vllm-2"]
