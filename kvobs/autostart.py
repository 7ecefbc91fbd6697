"""When a process becomes worth observing: start on demand, never deadlock an import, never raise.

An armed process pays one call per module that it imports. The runtime (a thread, an endpoint, a store) begins
only once a library that kvobs observes was imported, so that a shell tool or pip below ``kvobs run`` opens
nothing. Only cheap modules of the standard library are imported at the top.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock  # threading would double what this module costs every process
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Self

    from kvobs.allocator.forecast import NextStep
    from kvobs.runtime import Runtime

# The libraries that the sources of this version observe.
TRIGGERS = frozenset({"torch", "transformers"})

_armed = False
_settings: dict[str, str] = {}
_starting = allocate_lock()
_reported = False
_multiprocessing_watched = False


def arm(settings: Mapping[str, object] | None = None) -> None:
    """Start kvobs as soon as one of ``TRIGGERS`` has been imported (now, if one is already).

    Never raises; a refused setting is logged once, as one sentence, when kvobs would have started.
    """
    global _armed
    _settings.update(_texts(settings or {}))
    _armed = True
    if not TRIGGERS.isdisjoint(sys.modules):
        _start_unless_starting()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def disarm() -> None:
    """Undo ``arm``; a runtime that already began goes on."""
    global _armed
    _armed = False
    _settings.clear()
    _remove_finders()


def instrument(settings: Mapping[str, object]) -> Handle:
    """Start at once.

    Raises:
        kvobs.config.ConfigError: one of ``settings`` was refused; a bad environment is logged instead.
    """
    from kvobs import config

    texts = _texts(settings)
    config.load({}, **texts)
    with _starting:
        if texts and _current() is not None:
            import logging

            logging.getLogger("kvobs").warning(
                "kvobs: this process is already observed; the settings of the second instrument() are not used.")
        _start(texts)
    return Handle()


def uninstrument() -> None:
    """Stop the runtime, if any, and do not start on demand any more."""
    disarm()
    found = _current()
    if found is not None:
        from kvobs import runtime

        runtime.stop()


class Handle:
    """What ``kvobs.instrument`` returns."""

    @property
    def active(self) -> bool:
        """Whether this process is observed."""
        return self.runtime is not None

    @property
    def runtime(self) -> Runtime | None:
        """The running runtime."""
        return _current()

    @property
    def endpoint(self) -> str | None:
        """The address of the metrics page, if one is served."""
        return self.runtime.endpoint if self.runtime is not None else None

    def flush(self) -> None:
        """Bring everything that happened so far to the exporters and the store."""
        if self.runtime is not None:
            self.runtime.flush()

    def verdict(self, device: str | None = None) -> list[NextStep]:
        """What the allocator would do with the next step of all live caches together, per accelerator. Estimated.

        From any thread; it does not raise. It is expensive: one snapshot of the allocator (without its history), whose
        lock the engine's allocations wait for, some milliseconds per thousand blocks, then seconds at most of pure
        Python in the calling thread. So it is for a person or an alarm that asks, not for polling. What it does not
        know (activations, workspaces, which of the caches rest) each answer says in ``not_known``.

        Args:
            device: a name such as ``cuda:0``; None for every device that this process uses.
        Returns:
            One answer per device. The list is never empty: where nothing can be judged (no accelerator, no cache that
            grows, a CUDA graph being captured, a recorded memory history) the ``verdict`` of its answer is None and
            ``sentence`` says why.
        """
        runtime = self.runtime
        if runtime is not None:
            return runtime.verdict(device)
        from kvobs.allocator.forecast import absent

        return [absent("This process is not observed.", device or "")]

    def report(self, name: str, value: float) -> None:
        """Tell the breaker a signal of the application: cpu, hit_rate, gateway_p99 (s), pool_use, or app.NAME.

        From any thread. Nothing happens where this process is not observed or has no breaker.

        Raises:
            ValueError: the name is not one of these, or 64 others were reported.
        """
        runtime = self.runtime
        if runtime is not None and runtime.protection is not None:
            runtime.protection.report(name, value, time.monotonic_ns())

    def uninstrument(self) -> None:
        """Stop observing, as ``kvobs.uninstrument``."""
        uninstrument()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstrument()


class _Finder:
    """Asked before every import; steps aside for good once a trigger is looked for."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in TRIGGERS:
            return None
        try:
            import importlib.util

            import wrapt

            # Looking for a module is not importing it (libraries probe): only wrapt's hook starts kvobs.
            for trigger in TRIGGERS:
                wrapt.register_post_import_hook(_imported, trigger)
            _remove_finders()
            return importlib.util.find_spec(name)  # anew, now that wrapt's finder stands first
        except Exception as error:
            _report(error)
            return None


def _remove_finders() -> None:
    for finder in [finder for finder in sys.meta_path if isinstance(finder, _Finder)]:
        sys.meta_path.remove(finder)


def _imported(_: ModuleType) -> None:
    if _armed:
        _start_unless_starting()


def _start_unless_starting() -> None:
    # Never wait here: this thread holds the import lock of the trigger, and the one that is starting may need it.
    if _starting.acquire(blocking=False):
        try:
            _start(_settings)
        finally:
            _starting.release()


def _start(texts: Mapping[str, str]) -> None:
    """Start the runtime unless it runs; a failure of any kind is logged once."""
    if _current() is not None:
        return
    try:
        from kvobs import config

        loaded = config.load(os.environ, **texts)
        if loaded.virtual_gpu:
            _set_up_virtual(loaded.virtual_gpu, loaded.virtual_latency)
        if not loaded.enabled:
            return
        from kvobs import runtime

        runtime.start(loaded)
        _finish_forked_workers()
    except Exception as error:
        _report(error)


def _set_up_virtual(sizes: tuple[int, ...], latency: str) -> None:
    from kvobs import virtual

    try:
        virtual.setup(sizes, latency=None if latency == "off" else latency.upper())
    except virtual.Unavailable as error:
        import logging

        logging.getLogger("kvobs").error("kvobs: %s", error)


def _current() -> Runtime | None:
    module = sys.modules.get("kvobs.runtime")
    found: Runtime | None = module.current() if module is not None else None
    return found


def _finish_forked_workers() -> None:
    """Workers that multiprocessing forks end without ``atexit``: have them flush through its own finalizers."""
    global _multiprocessing_watched
    if not _multiprocessing_watched:
        _multiprocessing_watched = True
        import wrapt

        wrapt.register_post_import_hook(_watch_multiprocessing, "multiprocessing.util")


def _watch_multiprocessing(util: ModuleType) -> None:
    from kvobs import runtime

    def finish(module: ModuleType) -> None:
        util.Finalize(None, module.stop, exitpriority=-10)  # after the worker's own children were joined

    finish(runtime)  # this may be such a worker
    util.register_after_fork(runtime, finish)  # runs after a forked worker has forgotten its parent's finalizers


def _texts(settings: Mapping[str, object]) -> dict[str, str]:
    return {name: _text(value) for name, value in settings.items()}


def _text(value: object) -> str:
    if value is None:
        return "off"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value)


def _report(error: Exception) -> None:
    """Say once, in one sentence, that and why this process is not observed."""
    global _reported
    if _reported:
        return
    _reported = True
    import logging

    settings = sys.modules.get("kvobs.config")  # importing it here could fail, and this must not
    refused = settings is not None and isinstance(error, settings.ConfigError)
    reason = str(error) if refused else f"starting failed with {type(error).__name__}: {error}"
    log = logging.getLogger("kvobs")
    log.error("kvobs: this process is not observed: %s", reason, exc_info=log.isEnabledFor(logging.DEBUG))


def _after_fork() -> None:
    global _starting
    _starting = allocate_lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
