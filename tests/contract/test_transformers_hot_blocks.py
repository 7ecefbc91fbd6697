"""Hot blocks of continuous batching on real paged caches: what evictions pass over, and that nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                    reason="This transformers is older than 5.18; kvobs follows its continuous batching from there on.")

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvobs.sources.transformers import _actions_hot
from tests.contract.hot_paged import PAGE, Pool, prompt

SECOND = 10**9
METHODS = {name: vars(PagedAttentionCache)[name] for name in _actions_hot.PATCHED}


class Clock:
    """Nanoseconds that go on when told."""

    now = SECOND

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(_actions_hot, "time", found)
    return found


@pytest.fixture
def made(clock: Clock) -> Iterator[Any]:
    pools: list[Pool] = []

    def make(blocks: int, margin: float = 0.0) -> Pool:
        pools.append(Pool(blocks, margin))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert {name: vars(PagedAttentionCache)[name] for name in METHODS} == METHODS


def heat(pool: Pool, number: int, blocks: int, times: int) -> None:
    """A prompt is asked for once, and then found so often."""
    for _ in range(times + 1):
        pool.admit(prompt(number, blocks))
        pool.end()


@pytest.mark.parametrize(("hits", "wait_s", "stays"), [(2, 0, False), (3, 0, True), (3, 29, True), (3, 30, False)])
def test_hot_is_more_than_two_hits_in_thirty_seconds(made: Any, clock: Clock, hits: int, wait_s: int,
                                                     stays: bool) -> None:
    """The third hit makes a block hot, and 30 s after the first of the three it is hot no more."""
    pool = made(20)
    pool.hot.begin(pool.cache)
    heat(pool, 1, 3, hits)
    heat(pool, 2, 2, 0)
    clock.now += wait_s * SECOND
    assert pool.sweep()
    assert len(pool.cached) == (3 if stays else 0)


def test_a_block_is_passed_over_once_until_it_is_hit(made: Any) -> None:
    """The second eviction takes what the first one passed over; a hit in between makes it last for one more."""
    pool = made(20)
    pool.hot.begin(pool.cache)
    heat(pool, 1, 3, 3)
    heat(pool, 2, 2, 0)
    assert pool.sweep()
    kept = pool.cached
    assert pool.admit(prompt(1, 3)) == 3 * PAGE
    pool.end()
    heat(pool, 3, 2, 0)
    assert pool.sweep()
    assert pool.cached == kept
    heat(pool, 4, 2, 0)
    assert pool.sweep()
    assert pool.cached == []
    assert pool.hot.told() == (6, 3)


def test_at_most_half_of_the_pool_is_passed_over(made: Any) -> None:
    """Of twelve hot blocks in a pool of sixteen the first eight of the prefix stay, which can be found alone."""
    pool = made(16)
    pool.hot.begin(pool.cache)
    heat(pool, 1, 12, 3)
    order = pool.cached
    assert pool.sweep()
    assert pool.cached == order[:8]
    assert pool.admit(prompt(1, 12)) == 8 * PAGE


def test_the_margin_comes_first(made: Any) -> None:
    """Where the scheduler would let fewer requests in, hot blocks go too, the end of the prefix first; one may stay."""
    pool = made(20, margin=0.85)
    pool.hot.begin(pool.cache)
    heat(pool, 1, 8, 3)
    order = pool.cached
    assert pool.sweep()
    assert pool.counted_free() >= 0.85 * 20
    assert pool.cached == order[:len(pool.cached)]
    assert 0 < len(pool.cached) <= 3


def test_starved_requests_come_first(made: Any) -> None:
    """A request that has no room for its next tokens gets it from hot blocks, in the very eviction."""
    pool = made(10)
    pool.hot.begin(pool.cache)
    assert pool.admit(prompt(9, 4)) == 0
    heat(pool, 1, 4, 3)
    state = next(iter(pool.states.values()))
    pool.scheduler.starved_requests = [(state, 5 * PAGE)]
    assert pool.sweep()
    assert pool.cache.can_store_request_tokens(state, 5 * PAGE)


def test_who_has_no_room_gets_what_was_passed_over(made: Any) -> None:
    """A request, and a fork, that would have had room after a plain eviction have it: blocks passed over go then."""
    for what in ("request", "fork"):
        pool = made(12)
        pool.hot.begin(pool.cache)
        heat(pool, 1, 5, 3)
        heat(pool, 2, 1, 0)
        assert pool.sweep()
        assert len(pool.cached) == 5
        if what == "request":
            assert pool.admit(prompt(3, 9)) == 0
        else:
            assert pool.admit(prompt(3, 3)) == 0
            copies: dict[str, Any] = {name: ([], []) for name in pool.cache.cache_allocators}
            state = next(iter(pool.states.values()))
            children = [f"child{number}" for number in range(6)]
            assert pool.cache.prepare_fork_request(state, children, copies) == children
        assert len(pool.cached) < 5
        pool.close()


def test_undone_it_is_the_engines_own(made: Any) -> None:
    """After the end the class has its own methods, the order of cached blocks is untouched, and all go at once."""
    pool = made(20)
    heat(pool, 1, 4, 3)
    order = pool.cached
    pool.hot.begin(pool.cache)
    pool.hot.begin(pool.cache)
    assert vars(PagedAttentionCache)["evict_cached_blocks"] is not METHODS["evict_cached_blocks"]
    pool.hot.end()
    assert {name: vars(PagedAttentionCache)[name] for name in METHODS} == METHODS
    assert pool.cached == order
    assert pool.sweep()
    assert pool.cached == []


def test_an_ordered_eviction_keeps_hot_blocks(made: Any) -> None:
    """What a breaker has evicted is all but the hot blocks, protected or not, as often as it wants."""
    pool = made(20)
    heat(pool, 2, 3, 0)
    heat(pool, 1, 4, 3)
    for protects in (False, True):
        if protects:
            pool.hot.begin(pool.cache)
        for _ in range(2):
            assert pool.hot.evict(pool.cache) == 4
            assert len(pool.cached) == 4
        heat(pool, 3, 3, 0)
    assert pool.admit(prompt(1, 4)) == 4 * PAGE


class Programs(RuleBasedStateMachine):
    """Requests on a small pool, with evictions whenever; hits and the rule are kept on plain lists."""

    @initialize(blocks=st.integers(4, 24), margin=st.sampled_from([0.0, 0.15, 0.5]))
    def begin(self, blocks: int, margin: float) -> None:
        """A pool of some size."""
        self.clock = Clock()
        self.restore, _actions_hot.time = _actions_hot.time, self.clock  # type: ignore[assignment]
        self.pool = Pool(blocks, margin)
        self.hits: dict[tuple[int, int], list[int]] = {}  # by the block and the hash of what it holds
        self.passed: set[int] = set()

    def teardown(self) -> None:
        """The clock is the machine's, and the class the engine's."""
        if hasattr(self, "pool"):
            self.pool.close()
            _actions_hot.time = self.restore
        assert {name: vars(PagedAttentionCache)[name] for name in METHODS} == METHODS

    def content(self) -> dict[int, int]:
        """What cached blocks hold."""
        return {block: self.pool.allocator.ledger.block_to_hash[block] for block in self.pool.cached}

    @rule(number=st.integers(1, 3), blocks=st.integers(1, 6), again=st.integers(0, 3), ends=st.booleans())
    def ask(self, number: int, blocks: int, again: int, ends: bool) -> None:
        """Requests with the same prompt, one after another; who has no room finds nothing passed over."""
        for _ in range(again + 1):
            before = len(self.pool.states)
            found = self.pool.admit(prompt(number, blocks))
            if found is None:
                assert not self.passed & set(self.content().values())
                return
            table = self.pool.allocator.block_table[list(self.pool.states)[-1]]
            for block in table[:found // PAGE]:
                key = self.pool.allocator.ledger.block_to_hash[block]
                self.hits.setdefault((block, key), []).append(self.clock.now)
                self.passed.discard(key)
            if ends or len(self.pool.states) > 3:
                self.pool.end(before)

    @precondition(lambda self: self.pool.states)
    @rule(which=st.integers(0, 9))
    def end(self, which: int) -> None:
        """A request ends."""
        self.pool.end(which)

    @rule(seconds=st.sampled_from([1, 14, 30]))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.clock.now += seconds * SECOND

    @rule()
    def turn(self) -> None:
        """Protection begins, or ends."""
        if self.pool.hot.active:
            self.pool.hot.end()
        else:
            self.pool.hot.begin(self.pool.cache)
        self.passed = set()

    @rule()
    def sweep(self) -> None:
        """The engine evicts: what is kept was hot, within the share and not passed over before; the margin is met, or
        nothing is left; where all hot ones may stay, they do.
        """
        before, order = self.content(), self.pool.cached
        hot = {block for block, key in before.items() if len(
            [at for at in self.hits.get((block, key), []) if self.clock.now - at < 30 * SECOND]) > 2}
        may = {block for block in hot if before[block] not in self.passed} if self.pool.hot.active else set()
        assert self.pool.sweep() == bool(before)
        kept = set(self.pool.cached)
        room = self.pool.cache.num_blocks
        assert kept <= may
        assert len(kept) <= room // 2
        assert self.pool.cached == [block for block in order if block in kept]
        margin = self.pool.scheduler.safety_margin
        assert not kept or self.pool.counted_free() >= margin * room
        if len(hot) <= room // 2 and len(before) > len(may) and room - self.pool.used - len(may) >= margin * room:
            assert kept == may
        self.passed = {before[block] for block in kept}

    @invariant()
    def conserved(self) -> None:
        """Used, cached and free blocks are the pool's."""
        assert self.pool.counted_free() == self.pool.free
        assert not set(self.pool.cached) & {block for table in self.pool.allocator.block_table.values()
                                            for block in table}


Programs.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


class TestPrograms(Programs.TestCase):  # type: ignore[misc,name-defined]
    """Over random programs no block is lost, none is kept against the rule, and nobody waits for one."""
