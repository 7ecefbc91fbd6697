"""A hot prefix under real continuous batching: what protecting it is worth, and that tokens stay the same."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                    reason="This transformers is older than 5.18; kvobs follows its continuous batching from there on.")

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvobs import sessions
from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.model import ActionTaken, Blocks, HookFailed, Order, Turn
from kvobs.sources import Wiring, _hot
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._actions_hot import PATCHED
from kvobs.sources.transformers._actions_paged import PagedActions
from kvobs.sources.transformers._paged import PagedHooks
from tests.contract import paged
from tests.contract.paged import PAGE, greedy, pool
from tests.support import wait_until

pytestmark = pytest.mark.torch
llama = paged.llama  # a fixture is found by its name
POOL, ROUNDS, SCANS, PREFIX = 24, 6, 2, 4  # blocks, how often the prefix comes back, scans before it, its blocks


class Engine:
    """Continuous batching under kvobs's hooks, asked for one answer after another."""

    def __init__(self, network: Any) -> None:
        from opentelemetry.trace import NoOpTracer

        silent = NoOpTracer()
        self.bus = Bus(1_000_000)
        self.patches = Patches("transformers", self.bus.publish)
        self.actions = PagedActions(self.bus.publish)
        self.hooks = PagedHooks(Wiring(Config(), self.bus, lambda: silent), self.bus.publish, self.patches,
                                sessions.Names("plain"), sessions.TurnNumbers(), self.actions)
        self.hooks.install()
        self.manager = network.init_continuous_batching(generation_config=greedy(4),
                                                        continuous_batching_config=pool(POOL))
        self.manager.start()
        self.seen: list[Any] = []
        self.tokens: list[list[int]] = []

    def ask(self, prompt: list[int]) -> None:
        """One answer, alone."""
        name = self.manager.add_request(prompt)
        found: list[Any] = []
        wait_until(lambda: found.extend(one for one in [self.manager.get_result(timeout=0.01)] if one) or found,
                   what=f"the answer {name}")
        self.tokens.append(list(found[-1].generated_tokens))

    def order(self, kind: str, generation: int, *, undo: bool = False) -> ActionTaken:
        """An order to the idle engine, and its answer."""
        before = len(self.of(ActionTaken))
        self.actions.point.submit(Order(1, kind, generation, time.monotonic_ns() + 60 * 10**9, undo))
        wait_until(lambda: len(self.of(ActionTaken)) > before, what="the engine's safe point")
        taken: ActionTaken = self.of(ActionTaken)[-1]
        return taken

    def of(self, kind: type) -> list[Any]:
        """What was told so far."""
        self.seen += self.bus.drain()
        return [one for one in self.seen if type(one) is kind]

    def close(self) -> None:
        """The engine ends, then kvobs."""
        self.manager.stop(block=True, timeout=30)
        self.actions.close()
        self.hooks.uninstall()
        self.patches.restore()


def prompt(seed: int, shared: int, length: int) -> list[int]:
    """Tokens, of which the first are the same for all seeds."""
    return [(5 * place + (0 if place < shared else 13 * seed + 7)) % 97 for place in range(length)]


def played(network: Any, *, protect: bool) -> tuple[list[int], list[list[int]], list[ActionTaken], list[Blocks]]:
    """Tokens found again in each round, all tokens, the answers to orders, and the pool's blocks."""
    engine = Engine(network)
    try:
        answers = []
        engine.ask(prompt(90, 0, 20))
        if protect:
            answers.append(engine.order("protect_hot_blocks", 1))
        for seed in range(4):
            engine.ask(prompt(seed, PREFIX * PAGE, PREFIX * PAGE + 10))
        for number in range(ROUNDS):
            for scan in range(SCANS):
                engine.ask(prompt(100 + 10 * number + scan, 0, 7 * PAGE))
            engine.ask(prompt(50 + number, PREFIX * PAGE, PREFIX * PAGE + 10))
        if protect:
            answers.append(engine.order("protect_hot_blocks", 2, undo=True))
        turns, blocks = engine.of(Turn), engine.of(Blocks)
        assert not engine.of(HookFailed)
        return [turn.cached_tokens for turn in turns[5 + SCANS::SCANS + 1]], engine.tokens, answers, blocks
    finally:
        engine.close()


def test_a_hot_prefix_outlives_scans(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between scans that make the engine evict, the prefix is found at least twice as often with protection; tokens
    are the same, every block is used, cached or free, and in the end the class is the engine's own.
    """
    monkeypatch.setattr(_hot, "WINDOW_NS", 10**15)  # on a busy machine it may last for longer than 30 s
    methods = {name: vars(PagedAttentionCache)[name] for name in PATCHED}
    plain, tokens, _, blocks = played(llama, protect=False)
    found, tokens_protected, (began, ended), blocks_protected = played(llama, protect=True)
    assert {*plain, *found} <= {0, PREFIX * PAGE}
    assert sum(found) >= 2 * sum(plain)
    assert sum(found) > 0
    assert tokens == tokens_protected
    assert {one.used + one.cached + one.free for one in [*blocks, *blocks_protected]} == {POOL}
    assert (began.done, ended.done) == (True, True)
    assert ended.reason.startswith("Hot blocks were passed over ")
    assert {name: vars(PagedAttentionCache)[name] for name in PATCHED} == methods
    print(f"\nTokens of the prefix found again: plain {plain}, protected {found}. {ended.reason}")
