"""Engines with actuators that tests can drive: the queue alone, the pool of continuous batching, and transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvobs.bus import Bus
from kvobs.model import ActionTaken, Capability, Effect, Order
from kvobs.sources._safe_point import Action, Result, SafePoint
from kvobs.testing import ActuatorContract, Rig

SECOND_NS = 1_000_000_000


class Answers(list[Any]):
    """What was emitted; ``taken`` tells and forgets the answers."""

    def taken(self) -> list[ActionTaken]:
        found = [one for one in self if isinstance(one, ActionTaken)]
        self.clear()
        return found


class Engine:
    """A plain engine: ``flag`` can be set and unset, ``held`` bytes can be given back, and one action always fails."""

    def __init__(self) -> None:
        self.flag, self.held, self.half = False, 100, False

    def actions(self) -> tuple[Action, ...]:
        return (
            Action(Capability(1, "free", False, "Give back what is held."), lambda: Effect(self.held, None),
                   self._free),
            Action(Capability(2, "flag", True, "Set the flag."), lambda: Effect(0, None), self._set, self._unset),
            Action(Capability(1, "broken", True, "Fail half way."), self._no_plan, self._break, self._mend))

    def _free(self, _: int) -> Result:
        freed, self.held = self.held, 0
        return Result(True, freed)

    def _set(self, _: int) -> Result:
        self.flag = True
        return Result(True)

    def _unset(self, _: int) -> Result:
        self.flag = False
        return Result(True)

    def _no_plan(self) -> Effect:
        raise LookupError("nobody knows")

    def _break(self, _: int) -> Result:
        self.half = True
        raise RuntimeError("half way")

    def _mend(self, _: int) -> Result:
        self.half = False
        return Result(True)


class QueueContract(ActuatorContract):
    """The queue alone, over the plain engine."""

    acts = ("free", "flag")

    @contextmanager
    def rig(self) -> Iterator[Rig]:
        engine, answers = Engine(), Answers()
        point = SafePoint("engine", engine.actions(), answers.append)
        try:
            yield Rig(point, point.run, answers.taken, lambda: (engine.flag, engine.half))
        finally:
            point.close()


class TorchContract(ActuatorContract):
    """torch's allocators and the C heap, as they are in this process."""

    acts = ("malloc_trim",)

    @contextmanager
    def rig(self) -> Iterator[Rig]:
        from kvobs.sources._torch import TorchSource

        answers = Answers()
        source = TorchSource(Bus(64))
        source.install(answers.append)
        try:
            point, = source.actuators
            yield Rig(point, point.run, answers.taken, _settings)  # type: ignore[attr-defined]
        finally:
            source.uninstall()


def _settings() -> str:
    import torch

    return str(torch._C._accelerator_getAllocatorSettings())


class PagedContract(ActuatorContract):
    """A real paged cache of continuous batching: of nine blocks that are kept for reuse three are hot."""

    acts = ("protect_hot_blocks", "evict_cached_blocks")

    @contextmanager
    def rig(self) -> Iterator[Rig]:
        from kvobs.sources.transformers._actions_paged import PagedActions
        from tests.contract.hot_paged import Pool, prompt

        answers, pool = Answers(), Pool(20)
        pool.close()
        actions = PagedActions(answers.append)
        pool.hot = actions.hot
        actions.reached(pool.processor)
        for number, times, blocks in ((1, 1, 6), (2, 4, 3)):
            for _ in range(times):
                pool.admit(prompt(number, blocks))
                pool.end()
        try:
            yield Rig(actions.point, lambda: actions.reached(pool.processor), answers.taken,
                      lambda: (vars(type(pool.cache)).copy(), pool.cached))
        finally:
            actions.close()


class Caches:
    """Tiny models under the installed source, with sessions; every cache counts as idle between its own passes."""

    def __init__(self, device: str = "cpu", idle_ns: int = 0, **settings: Any) -> None:
        from opentelemetry.trace import NoOpTracer

        from tests.contract import tiny
        from tests.contract.conftest import Watch

        silent = NoOpTracer()
        self.tiny, self.device = tiny, device
        self.watch = Watch(lambda: silent, **settings)
        self.point: Any = self.watch.source.actuators[0]
        self.watch.source._actions.uses.idle_ns = idle_ns
        self.model = tiny.llama().to(device)
        self._generation = 0
        self._answers: list[ActionTaken] = []

    def session(self, length: int, new: int, seed: int = 1, rows: int = 1) -> Any:
        """A cache that a generate call has filled."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        self.tiny.greedy(self.model, self.tiny.prompt(length, rows, seed).to(self.device), new,
                         **{self.tiny.CACHE: cache})
        return cache

    def reach(self) -> None:
        """A forward pass without a cache: a safe point."""
        import torch

        with torch.no_grad():
            self.model(self.tiny.prompt(2).to(self.device), use_cache=False)

    def submit(self, kind: str, *, undo: bool = False, seconds: float = 60.0) -> None:
        self._generation += 1
        level = next(one.level for one in self.point.capabilities() if one.kind == kind)
        self.point.submit(Order(level, kind, self._generation, time.monotonic_ns() + int(seconds * SECOND_NS), undo))

    def order(self, kind: str, *, undo: bool = False) -> ActionTaken:
        """Order one thing, and its answer."""
        self.submit(kind, undo=undo)
        self.reach()
        taken, = self.answers()
        return taken

    def answers(self) -> list[ActionTaken]:
        return self.watch.of(ActionTaken)

    def state(self, *caches: Any) -> Any:
        """Content, shapes and devices of caches, and the functions of the classes that actions patch."""
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        return ([(tuple(tensor.shape), str(tensor.device), tensor.cpu().contiguous().numpy().tobytes())
                 for cache in caches for layer in cache.layers for tensor in (layer.keys, layer.values)],
                [dict(vars(kind)) for kind in (DynamicLayer, DynamicSlidingWindowLayer)])

    def close(self) -> None:
        self.watch.close()


@contextmanager
def caches(device: str = "cpu", idle_ns: int = 0, **settings: Any) -> Iterator[Caches]:
    found = Caches(device, idle_ns, **settings)
    try:
        yield found
    finally:
        found.close()


class CachesContract(ActuatorContract):
    """The caches of transformers: two sessions, one of which was cropped so that it wastes room."""

    acts: tuple[str, ...] = ("chunked_growth", "compact")
    device = "cpu"

    @contextmanager
    def rig(self) -> Iterator[Rig]:
        with caches(self.device) as found:
            kept = [found.session(11, 5, 1), found.session(40, 3, 2, rows=2)]
            kept[1].crop(-20)
            found.answers()
            yield Rig(found.point, found.reach, found.answers, lambda: found.state(*kept))
