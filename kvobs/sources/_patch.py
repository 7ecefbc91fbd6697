"""Replace attributes of third-party objects and put the very same objects back."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from kvobs.model import Emit, HookFailed

_log = logging.getLogger("kvobs")
_MISSING = object()


class Patches:
    """The patches of one source. A patch is known by ``name``, as in messages and ``HookFailed`` events."""

    def __init__(self, source: str, emit: Emit) -> None:
        self._source = source
        self._emit = emit
        self._lock = threading.RLock()
        self._done: dict[str, tuple[Any, str, object, object]] = {}

    def wrap(self, owner: Any, attribute: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace ``owner.attribute`` by ``make(original)``; a second wrap of the same place is ignored.

        Only the owner's own namespace is touched: an inherited attribute is shadowed, and unshadowed again.
        """
        name = f"{getattr(owner, '__name__', owner)}.{attribute}"
        with self._lock:
            if name in self._done and self._done[name][0] is not owner:
                name = f"{owner.__module__}.{name}"
            if name in self._done:
                return
            own = vars(owner).get(attribute, _MISSING)
            original = getattr(owner, attribute)
            new = functools.wraps(original)(make(original))
            setattr(owner, attribute, new)
            self._done[name] = (owner, attribute, own, new)

    def fail(self, name: str, error: BaseException) -> None:
        """A hook of the patch ``name`` raised: say so once, and take the patch away."""
        with self._lock:
            if name not in self._done:
                return
            self._restore(name)
        _log.warning("kvobs: the hook %s of source %s raised %s: %s; it was detached, the process is not affected.",
                     name, self._source, type(error).__name__, error)
        self._emit(HookFailed(time.monotonic_ns(), self._source, name, f"{type(error).__name__}: {error}"))

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def restore(self) -> None:
        """Put every original back (by identity, unless somebody has patched over us meanwhile)."""
        with self._lock:
            for name in list(self._done):
                self._restore(name)

    def _restore(self, name: str) -> None:
        owner, attribute, own, new = self._done.pop(name)
        if vars(owner).get(attribute) is not new:
            return  # somebody wrapped our wrapper: it stays underneath and passes through while kvobs is off
        if own is _MISSING:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, own)
