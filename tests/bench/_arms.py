"""The states that are compared: no kvobs, kvobs as it starts by default, kvobs installed but inactive."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvobs.config import Config
from kvobs.runtime import Runtime

OFF, ON, DISABLED = "off", "on", "disabled"
DRAIN_THREAD = "kvobs-drain"


def configuration(directory: str) -> Config:
    """The default mode (store and endpoint on), on a free port and a store of its own."""
    return Config(store=Path(directory), prometheus=("127.0.0.1", 0), otlp="auto")


@contextlib.contextmanager
def arm(name: str) -> Iterator[Runtime | None]:
    """The process in that state; afterwards nothing of kvobs is left."""
    gc.collect()
    if name == OFF:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvobs-bench-") as directory:
        runtime = Runtime(configuration(directory))
        runtime.start()
        runtime.flush()  # the store's first commit makes its schema: a cost of starting, not of observing
        runtime.bus.active = name == ON
        try:
            yield runtime
        finally:
            runtime.stop()


def drain_cpu_ns() -> int:
    """CPU time of the drain thread so far; 0 when there is none."""
    for thread in threading.enumerate():
        if thread.name == DRAIN_THREAD and thread.ident is not None:
            return time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
    return 0
