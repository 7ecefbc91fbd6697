"""The SGLang source without SGLang: its accounting, its clock, and what it says when something is not there."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import NoOpTracer

from kvobs import model
from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.sources import Wiring
from kvobs.sources.sglang import SglangSource, _hooking
from kvobs.sources.sglang._balance import Tokens, balance, gap_of
from kvobs.sources.sglang._clock import TickClock
from kvobs.sources.sglang._hooking import Hooking
from kvobs.sources.sglang._hooks import EngineHooks

PAGES = st.integers(0, 50)


def source() -> tuple[SglangSource, Bus]:
    bus = Bus(1_000)
    return SglangSource(Wiring(Config(), bus, NoOpTracer)), bus


@given(free=PAGES, cached=PAGES, locked=PAGES, held=PAGES, own=PAGES, lost=st.integers(-20, 20),
       page=st.sampled_from((1, 4, 16, 64)), idle=st.booleans(), believed=st.booleans())
def test_states_and_the_gap_are_the_pool(free: int, cached: int, locked: int, held: int, own: int, lost: int,
                                         page: int, idle: bool, believed: bool) -> None:
    """States made of whole pages come back as they were made, the gap as unexplained, and the sum is the pool."""
    own = 0 if idle else own
    size = free + cached + locked + held + own + lost
    tokens = Tokens(*(number * page for number in (size, free, cached, locked, held, own)))
    states = balance(tokens, page, idle=idle, believed=believed)
    assert sum(states) == size
    assert gap_of(tokens) == lost * page
    assert (states.cached, states.free, states.pinned) == (cached, free, held + (locked if idle else 0))
    if believed:
        assert (states.used, states.unexplained) == (0 if idle else locked + own, lost)
    else:
        assert states.unexplained == 0


@given(gap=st.integers(-200, 200).filter(bool), page=st.sampled_from((4, 16)))
def test_a_gap_of_less_than_a_block_is_not_lost(gap: int, page: int) -> None:
    """Any gap at all is at least one block, with its sign."""
    states = balance(Tokens(1_600, 1_600 - gap, 0, 0, 0, 0), page, idle=True, believed=True)
    assert states.unexplained * gap > 0
    assert abs(states.unexplained) == -(-abs(gap) // page)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60_000_000)), min_size=1, max_size=200))
def test_ticks_are_dated_to_the_resolution(steps: list[tuple[int, int]]) -> None:
    """With room for all notes a tick is dated at most 10 ms before it was drawn, and never after it."""
    clock, tick, now = TickClock(), 0, 1_000
    drawn: list[tuple[int, int]] = []
    for ticks, waits in steps:
        clock.note(tick, now)
        drawn += [(tick + more, now) for more in range(ticks)]
        tick, now = tick + ticks, now + waits
    for found, at in drawn:
        dated = clock.time_of(found)
        assert dated is not None
        assert 0 <= at - dated < 10_000_000


def test_old_ticks_are_dated_relative_to_their_age() -> None:
    """A clock that keeps 64 notes a tier dates each of 10,000 ticks to a 32nd of its age, or to a note."""
    clock, every, number = TickClock(kept=64), 10_000_000, 10_000
    for tick in range(number):
        clock.note(tick, tick * every)
    for tick in range(number):
        dated = clock.time_of(tick)
        assert dated is not None
        assert 0 <= tick * every - dated <= max(every, (number - tick) * every / 32)


def test_without_sglang_it_says_so() -> None:
    """A process that has not imported SGLang is told of as such, and nothing is observed."""
    made, bus = source()
    made.install(bus.publish)
    assert [(fact.available, fact.reason) for fact in made.availability()] == [
        (False, "SGLang has not been imported in this process.")]
    made.uninstall()
    made.uninstall()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang without one of the hooked methods is observed as far as it goes, and the missing one is named."""
    class RadixCache:
        def evict(self) -> None: ...
        def reset(self) -> None: ...

    module = types.ModuleType("sglang.srt.mem_cache.radix_cache")
    module.RadixCache = RadixCache  # type: ignore[attr-defined]
    originals = dict(vars(RadixCache))
    made, bus = source()
    made.install(bus.publish)
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    made._placing(made._points(made._engine)[module.__name__])(module)  # type: ignore[arg-type]
    assert vars(RadixCache)["evict"] is not originals["evict"]
    first = next(iter(made.availability()))
    assert first == model.Availability("sglang", False, "SGLang's RadixCache._delete_leaf could not be hooked "
                                       "(AttributeError: RadixCache._delete_leaf not found).")
    made.uninstall()
    assert dict(vars(RadixCache)) == originals


def test_a_hook_that_fails_leaves_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that kvobs cannot read goes on: the hook is taken away, once, and the reason says which."""
    class Scheduler:
        def get_next_batch_to_run(self) -> str:
            return "batch"

        def on_idle(self) -> None: ...

    original = vars(Scheduler)["get_next_batch_to_run"]
    module = types.ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", types.ModuleType("sglang"))
    made, bus = source()
    made.install(bus.publish)
    made._placing(made._points(made._engine)[module.__name__])(module)  # type: ignore[arg-type]
    assert [Scheduler().get_next_batch_to_run() for _ in range(2)] == ["batch", "batch"]
    assert [event.hook for event in bus.drain() if isinstance(event, model.HookFailed)] == [
        "Scheduler.get_next_batch_to_run"]
    assert vars(Scheduler)["get_next_batch_to_run"] is original
    assert "The hook Scheduler.get_next_batch_to_run failed and was detached." in next(iter(made.availability())).reason
    made.uninstall()


def admission(result: str, request: Any, *, taken: bool) -> Any:
    tree = SimpleNamespace()
    return SimpleNamespace(name=result), SimpleNamespace(tree_cache=tree, can_run_list=[request] if taken else []), tree


def test_prefixes_count_at_admission() -> None:
    """Of three tries one was refused for tokens, one admitted anew and one after a retraction that had lost 30."""
    bus = Bus(100)
    hooks = EngineHooks(bus, bus.publish, Hooking(bus.publish), str)
    pool = SimpleNamespace(failures=0, failures_waiting=0, touches=0, page_size=4, queried=0, hit=0, resumed_queried=0,
                           resumed_hit=0, recomputed=0)
    pools: Any = SimpleNamespace(first=pool, lost={"again": 30})
    for result, name, taken, again, hit in (("NO_TOKEN", "new", False, False, 8), ("CONTINUE", "new", True, False, 8),
                                            ("CONTINUE", "again", True, True, 12)):
        request = SimpleNamespace(rid=name, full_untruncated_fill_ids=[0] * 40, prefix_len=hit, retracted_stain=again)
        answer, adder, tree = admission(result, request, taken=taken)
        hooks._by_tree[id(tree)] = pools
        hooks.admitted(answer, adder, request)
    assert (pool.failures, pool.failures_waiting, pool.touches) == (1, 1, 5)
    assert (pool.queried, pool.hit, pool.resumed_queried, pool.resumed_hit, pool.recomputed) == (40, 8, 40, 12, 18)


def test_the_plugin_arms_kvobs_through_the_registry_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While SGLang loads the entry point, and only then, what kvobs hooks goes into SGLang's registry."""
    from kvobs.plugins import _sglang

    seen: list[bool] = []
    monkeypatch.setattr(_sglang.autostart, "arm", lambda: seen.append(_hooking._loading))
    _sglang.plugin()
    seen.append(_hooking._loading)
    assert seen == [True, False]
