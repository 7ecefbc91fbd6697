"""Install, uninstall, poll: the source as the runtime sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType

from kvobs.model import Availability, Emit, Event
from kvobs.sessions import Names, TurnNumbers
from kvobs.sources import Wiring
from kvobs.sources._imports import when_imported
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._caches import SOURCE, CacheRegistry
from kvobs.sources.transformers._hooks import Hooks
from kvobs.sources.transformers._paged import PagedHooks
from kvobs.sources.transformers._turns import Turns

SUPPORTED = ((5, 0), (6, 0))
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

    def install(self, emit: Emit) -> None:
        """Hook in now, or as soon as the parts of transformers that are hooked have been imported."""
        if self._patches is not None:
            return
        self._emit = emit
        self._patches = Patches(SOURCE, emit)
        self._cancels = [
            when_imported("transformers.modeling_utils", self._guarded(self._on_models)),
            when_imported("transformers.generation.utils", self._guarded(self._on_generation)),
            when_imported("transformers.cache_utils", self._guarded(self._on_caches)),
        ]

    def uninstall(self) -> None:
        """Close open turns and put every original back."""
        for cancel in self._cancels:
            cancel()
        if self._hooks is not None:
            self._hooks.close_idle(0, everything=True)
        if self._paged is not None:
            self._paged.uninstall()
        if self._patches is not None:
            self._patches.restore()
        if self._caches is not None:
            self._caches.clear()
        self._cancels, self._patches, self._hooks, self._caches, self._paged = [], None, None, None, None

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Close turns of bare forward passes that have come to an end."""
        if self._hooks is not None:
            self._hooks.close_idle(now_ns)
        return ()

    def after_fork_in_child(self) -> None:
        """Leave the parent's open turns to it."""
        if self._patches is not None:
            self._patches.after_fork_in_child()
        if self._hooks is not None:
            self._hooks.after_fork_in_child()

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
            config = self._wiring.config
            names, numbers = Names(config.session_ids, config.session_key), TurnNumbers()
            self._caches = CacheRegistry(self._emit)
            turns = Turns(self._emit, self._wiring.tracer, names, numbers)
            self._hooks = Hooks(self._wiring.bus, self._patches, self._caches, turns,
                                torch.compiler.is_compiling, torch.jit.is_tracing, config.record_prompts)
            self._paged = PagedHooks(self._wiring, self._emit, self._patches, names, numbers)
            self._paged.install()
        return self._hooks

    def _on_models(self, module: ModuleType) -> None:
        hooks = self._prepare()
        assert self._patches is not None
        self._patches.wrap(module.PreTrainedModel, "__call__", hooks.forward)
        self._patches.wrap(module.PreTrainedModel, "get_compiled_call", hooks.compiled)

    def _on_generation(self, module: ModuleType) -> None:
        hooks = self._prepare()
        assert self._patches is not None
        self._patches.wrap(module.GenerationMixin, "generate", hooks.generate)

    def _on_caches(self, module: ModuleType) -> None:
        hooks = self._prepare()
        assert self._patches is not None
        for name in _REWRITES:
            if hasattr(module.Cache, name):
                self._patches.wrap(module.Cache, name, hooks.between.rewriting(name))
        for name in ("offload", "prefetch"):
            if hasattr(module.CacheLayerMixin, name):
                self._patches.wrap(module.CacheLayerMixin, name, hooks.between.moving(name))


def supported(version: str) -> bool:
    """Whether a transformers version lies in the supported range."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return False
    return SUPPORTED[0] <= (int(parts[0]), int(parts[1])) < SUPPORTED[1]
