"""Install, uninstall, poll: the source as the runtime sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from kvobs.allocator.forecast import Forecast
from kvobs.allocator.memory_map import Held
from kvobs.model import Actuator, Availability, Emit, Event, Poll
from kvobs.sessions import Names, TurnNumbers
from kvobs.sources import Wiring
from kvobs.sources._imports import when_imported
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._actions import Actions
from kvobs.sources.transformers._actions_paged import PagedActions
from kvobs.sources.transformers._caches import SOURCE, CacheRegistry
from kvobs.sources.transformers._demand import forecast
from kvobs.sources.transformers._held import held
from kvobs.sources.transformers._hooks import Hooks
from kvobs.sources.transformers._local import Local
from kvobs.sources.transformers._paged import PagedHooks
from kvobs.sources.transformers._sample import ATTENTION
from kvobs.sources.transformers._turns import Turns

if TYPE_CHECKING:
    from kvobs.sources.transformers._deep import Deep

SUPPORTED = ((5, 0), (6, 0))
PAUSED = "Observation is paused: caches that began meanwhile are not among those that are judged."
_REWRITES = ("reorder_cache", "crop", "reset", "batch_repeat_interleave", "batch_select_indices")


class TransformersSource:
    """Observes transformers in this process from the moment it is imported."""

    name = SOURCE

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._cancels: list[Callable[[], None]] = []
        self._patches: Patches | None = None
        self._hooks: Hooks | None = None
        self._caches: CacheRegistry | None = None
        self._paged: PagedHooks | None = None
        self._deep: Deep | None = None
        self._names: Names | None = None
        self._actions: Actions | None = None
        self._paged_actions: PagedActions | None = None

    @property
    def actuators(self) -> tuple[Actuator, ...]:
        """What can act on this engine while the source is installed."""
        paged = self._paged_actions if self._paged_actions is not None and self._paged_actions.used else None
        return tuple(one.point for one in (self._actions, paged) if one is not None)

    def install(self, emit: Emit) -> None:
        """Hook in now, or as soon as the parts of transformers that are hooked have been imported."""
        if self._patches is not None:
            return
        self._emit = emit
        self._patches = Patches(SOURCE, emit)
        self._actions, self._paged_actions = _acting(self._wiring, emit), PagedActions(emit)
        self._cancels = [
            when_imported("transformers.modeling_utils", self._guarded(self._on_models)),
            when_imported("transformers.generation.utils", self._guarded(self._on_generation)),
            when_imported("transformers.cache_utils", self._guarded(self._on_caches)),
        ]

    def uninstall(self) -> None:
        """Close open turns and put every original back."""
        for cancel in self._cancels:
            cancel()
        if self._paged_actions is not None:
            self._paged_actions.close()
        if self._actions is not None:
            self._actions.close()
        if self._hooks is not None:
            self._hooks.close_idle(0, everything=True)
        if self._paged is not None:
            self._paged.uninstall()
        if self._patches is not None:
            self._patches.restore()
        if self._caches is not None:
            self._caches.clear()
        self._cancels, self._patches, self._hooks, self._caches, self._paged = [], None, None, None, None
        self._deep = self._actions = self._paged_actions = None

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Close turns of bare forward passes that have come to an end; tell how many turns a pause cut."""
        if self._hooks is None:
            return ()
        self._hooks.close_idle(now_ns)
        cut = self._hooks.cut + (self._paged.cut if self._paged is not None else 0)
        return (Poll(now_ns, SOURCE, 0, (("kvobs.self.turns.cut", (), cut),)),) if cut else ()

    def demands(self) -> Forecast:
        """What the next step of every live cache asks for; estimated. Nothing is read from a device; from any thread.

        While observation pauses, caches that begin are not seen, which it then says.
        """
        registry = self._caches
        if registry is None:
            return Forecast()
        found = forecast(cache for record in registry.records() if not record.blind
                         and (cache := record.cache()) is not None)
        return found if self._wiring.bus.active else found._replace(unknown=(*found.unknown, PAUSED))

    def held(self) -> list[Held]:
        """Which memory live caches and the models that were seen hold, on accelerators; from any thread."""
        registry, names = self._caches, self._names
        if registry is None or names is None:
            return []
        try:
            models = list(registry.models)
        except RuntimeError:  # an engine's thread has just added one
            models = []
        return held(registry.records(), models, names.shown)

    def after_fork_in_child(self) -> None:
        """Leave the parent's open turns to it."""
        if self._patches is not None:
            self._patches.after_fork_in_child()
        if self._hooks is not None:
            self._hooks.after_fork_in_child()
        if self._paged is not None:
            self._paged.cut = 0
        if self._actions is not None and self._paged_actions is not None:
            self._actions.after_fork_in_child()
            self._paged_actions.after_fork_in_child()

    def availability(self) -> Iterable[Availability]:
        """Whether transformers is there and of a supported version."""
        module = sys.modules.get(SOURCE)
        if module is None:
            yield Availability(SOURCE, False, "transformers has not been imported in this process.")
            return
        version = str(getattr(module, "__version__", "0"))
        if not supported(version):
            low, high = (".".join(map(str, end)) for end in SUPPORTED)
            yield Availability(SOURCE, False, f"transformers {version} is outside the supported range >={low},<{high}.")
            return
        yield Availability(SOURCE, True, "")
        if self._paged is not None:
            yield from self._paged.availability()
        if not self._wiring.config.deep:
            yield Availability(ATTENTION, False, "Deep sampling is off; --deep or KVOBS_DEEP=on switches it on.")
        elif self._deep is not None:
            yield self._deep.availability()

    def _guarded(self, callback: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        def call(module: ModuleType) -> None:
            try:
                if self._patches is not None and supported(str(sys.modules[SOURCE].__version__)):
                    callback(module)
            except Exception as error:
                import logging

                logging.getLogger("kvobs").warning(
                    "kvobs: %s could not be observed (%s: %s); the process is not affected.",
                    module.__name__, type(error).__name__, error)

        return call

    def _prepare(self) -> Hooks:
        if self._hooks is None:
            import torch

            assert self._patches is not None
            assert self._actions is not None
            assert self._paged_actions is not None
            config = self._wiring.config
            names, numbers = Names(config.session_ids, config.session_key), TurnNumbers()
            self._names = names
            self._caches = CacheRegistry(self._emit)
            turns = Turns(self._emit, self._wiring.tracer, names, numbers)
            local = Local()
            if config.deep:
                from kvobs.sources.transformers._deep import Deep

                self._deep = Deep(self._wiring.bus, self._patches, local, self._wiring.tracer, names.shown,
                                  config.overhead_percent, torch.compiler.is_compiling)
            self._hooks = Hooks(self._wiring.bus, self._patches, self._caches, turns, torch.compiler.is_compiling,
                                torch.jit.is_tracing, config.record_prompts, self._deep, local, self._actions)
            between = self._hooks.between
            self._actions.attach(self._caches, lambda record: between.rewritten(record, lengths=False))
            self._paged = PagedHooks(self._wiring, self._emit, self._patches, names, numbers, self._paged_actions)
            self._paged.install()
        return self._hooks

    def _on_models(self, module: ModuleType) -> None:
        hooks = self._prepare()
        assert self._patches is not None
        self._patches.wrap(module.PreTrainedModel, "__call__", hooks.forward)
        self._patches.wrap(module.PreTrainedModel, "get_compiled_call", hooks.compiled)
        if self._deep is not None and not hasattr(module.AttentionInterface, "get_interface"):
            self._deep.without_interface(str(sys.modules[SOURCE].__version__))
        elif self._deep is not None:
            self._patches.wrap(module.AttentionInterface, "get_interface", self._deep.interface)

    def _on_generation(self, module: ModuleType) -> None:
        hooks = self._prepare()
        assert self._patches is not None
        self._patches.wrap(module.GenerationMixin, "generate", hooks.generate)

    def _on_caches(self, module: ModuleType) -> None:
        hooks = self._prepare()
        assert self._patches is not None
        assert self._actions is not None
        self._actions.growth.known(module)
        for name in _REWRITES:
            if hasattr(module.Cache, name):
                self._patches.wrap(module.Cache, name, hooks.between.rewriting(name))
        if self._deep is not None:
            self._patches.wrap(module.Cache, "update", self._deep.update)
        for name in ("offload", "prefetch"):
            if hasattr(module.CacheLayerMixin, name):
                self._patches.wrap(module.CacheLayerMixin, name, hooks.between.moving(name))


def _acting(wiring: Wiring, emit: Emit) -> Actions:
    return Actions(wiring.bus, emit, cut=wiring.config.cut_pending_evict)


def supported(version: str) -> bool:
    """Whether a transformers version lies in the supported range."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return False
    return SUPPORTED[0] <= (int(parts[0]), int(parts[1])) < SUPPORTED[1]
