"""Call something once a module has been imported, and be able to take that back.

wrapt's post-import hooks cannot be unregistered, so one hook per module name is registered for good and looks
up who still wants to know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType

import wrapt

Callback = Callable[[ModuleType], None]
_lock = threading.Lock()
_waiting: dict[str, list[Callback]] = {}


def when_imported(name: str, callback: Callback) -> Callable[[], None]:
    """Call ``callback(module)`` now if ``name`` is imported, else right after its import; returns a cancel."""
    with _lock:
        known = name in _waiting
        _waiting.setdefault(name, []).append(callback)
    if not known:
        wrapt.register_post_import_hook(_imported, name)
    else:
        import sys

        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            callback(module)

    def cancel() -> None:
        with _lock:
            if callback in _waiting.get(name, []):
                _waiting[name].remove(callback)

    return cancel


def _imported(module: ModuleType) -> None:
    with _lock:
        callbacks = list(_waiting.get(module.__name__, ()))
    for callback in callbacks:
        callback(module)
