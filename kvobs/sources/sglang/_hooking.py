"""Two ways to hook a method of SGLang, and the choice between them.

Hooks have the form of SGLang's AROUND hooks, ``hook(original, *args, **kwargs)``. Which way a hook takes is decided
once, when it is placed: while SGLang is loading kvobs as its plugin, the hook is handed to ``HookRegistry``, so that it
is applied with those of other plugins and after the classes that they replace; at any other time it is kvobs's own
patch. A place that one way has taken is never given to the other: no call is ever seen twice.

Only modules that have been imported are hooked through the registry, which would otherwise import a target's module:
that way the detokenizer's process does not load the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvobs.model import Emit, HookFailed
from kvobs.sources._patch import Patches

SOURCE = "sglang"
Hook = Callable[..., Any]
_REGISTRY = "sglang.srt.plugins.hook_registry"
_log = logging.getLogger("kvobs")
_loading = False


@contextlib.contextmanager
def through_registry() -> Iterator[None]:
    """What is hooked inside the block goes through SGLang's registry."""
    global _loading
    before, _loading = _loading, True
    try:
        yield
    finally:
        _loading = before


class Hooking:
    """The hooks of one source, by name (``Class.method``)."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._patches = Patches(SOURCE, emit)
        self._registered: dict[str, tuple[Any, str, str, Hook]] = {}
        self._placed: set[tuple[int, str]] = set()
        self._broken: set[str] = set()

    def place(self, owner: type, method: str, see: Hook) -> None:
        """Hook a method of the class's own; an inherited one is left to the class that has it.

        ``see(original, *args, **kwargs)`` calls the original exactly once and returns or raises what it does.

        Raises:
            AttributeError: the class has no such method of its own.
        """
        if method not in vars(owner):
            raise AttributeError(f"{owner.__name__}.{method} not found")
        if (id(owner), method) in self._placed:
            return
        self._placed.add((id(owner), method))
        if _loading and _REGISTRY in sys.modules:
            self._register(owner, method, see)
        else:
            self._patches.wrap(owner, method, lambda original: _around(see, original))

    def _register(self, owner: type, method: str, see: Hook) -> None:
        registry = sys.modules[_REGISTRY]
        target = f"{owner.__module__}.{owner.__qualname__}.{method}"
        name = f"{owner.__name__}.{method}"

        def hook(original: Hook, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if name in self._broken else see(original, *args, **kwargs)

        registry.HookRegistry.register(target, hook, registry.HookType.AROUND)
        self._registered[name] = (owner, method, target, hook)

    def hooks(self, owner: type, method: str) -> bool:
        """Whether a call of this class's method is seen."""
        for base in owner.__mro__:
            if method in vars(base):
                return (id(base), method) in self._placed and f"{base.__name__}.{method}" not in self._broken
        return False

    def failed(self, name: str, error: Exception) -> None:
        """A hook raised: say so once and take it away."""
        if name in self._broken:
            return
        self._broken.add(name)
        if name not in self._registered:
            self._patches.fail(name, error)
            return
        _log.warning("kvobs: the hook %s of source %s raised %s: %s; it passes through from now on, the process is not "
                     "affected.", name, SOURCE, type(error).__name__, error)
        self._emit(HookFailed(time.monotonic_ns(), SOURCE, name, f"{type(error).__name__}: {error}"))
        self._unregister(name)

    @property
    def unapplied(self) -> list[str]:
        """The hooks that were handed to SGLang's registry and that it has not applied."""
        module = sys.modules.get(_REGISTRY)
        done = module.HookRegistry._patched if module is not None else ()
        return sorted(name for name, (_, _, target, _) in self._registered.items() if target not in done)

    @property
    def broken(self) -> list[str]:
        """The hooks that failed and are gone."""
        return sorted(self._broken)

    def restore(self) -> None:
        """Put every original back by identity; below wrappers of somebody else ours stay and pass through."""
        self._patches.restore()
        for name in list(self._registered):
            self._broken.add(name)
            self._unregister(name)
        self._placed.clear()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._patches.after_fork_in_child()

    def _unregister(self, name: str) -> None:
        owner, method, target, hook = self._registered.pop(name)
        module = sys.modules.get(_REGISTRY)
        registry = module.HookRegistry if module is not None else None
        hooks = registry._hooks.get(target, []) if registry is not None else []
        alone = len(hooks) == 1 and hooks[0][1] is hook
        if registry is not None:
            registry._hooks[target] = [one for one in hooks if one[1] is not hook]
            if not registry._hooks[target]:
                del registry._hooks[target]
        applied = vars(owner).get(method)
        original = getattr(applied, "__wrapped__", None)
        if alone and original is not None and _closes_over(applied, hook):
            setattr(owner, method, original)
            if registry is not None:
                registry._patched.discard(target)


def _around(see: Hook, original: Hook) -> Hook:
    def call(*args: Any, **kwargs: Any) -> Any:
        return see(original, *args, **kwargs)

    return call


def _closes_over(wrapper: Any, hook: Hook) -> bool:
    """Whether the outermost wrapper of a method is the registry's around this very hook."""
    return any(cell.cell_contents is hook for cell in getattr(wrapper, "__closure__", None) or ())
