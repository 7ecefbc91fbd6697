"""Whether a CUDA graph is being captured by this process, which a drain thread cannot ask CUDA.

``torch.cuda.is_current_stream_capturing`` tells of the calling thread's own stream only. So the two methods through
which Python captures (torch.cuda.graph, make_graphed_callables, the compiler's graph trees) are watched. A capture
that begins in another way is not seen: reading statistics then takes a lock and copies counters, no more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from kvobs.sources._patch import Patches

_all: weakref.WeakSet[Captures] = weakref.WeakSet()


def anything_captured() -> bool:
    """Is a CUDA graph being captured, as far as any source of this process sees?"""
    return any(captures.running() for captures in list(_all))


class Captures:
    """The graphs that are being captured now; one that is freed without an end does not count any more."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        _all.add(self)

    def install(self, graph_class: type) -> None:
        """Watch the class's captures until the patches are restored."""
        self._patches.wrap(graph_class, "capture_begin", self._begin)
        self._patches.wrap(graph_class, "capture_end", self._end)

    def running(self) -> bool:
        """Is anything being captured?"""
        return bool(len(self._graphs))

    def _begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._note(self._graphs.add, graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException:
                self._note(self._graphs.discard, graph)
                raise

        return capture_begin

    def _end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(graph, *args, **kwargs)
            finally:
                self._note(self._graphs.discard, graph)

        return capture_end

    def _note(self, note: Callable[[Any], None], graph: Any) -> None:
        try:
            note(graph)
        except Exception as error:
            for name in ("CUDAGraph.capture_begin", "CUDAGraph.capture_end"):
                self._patches.fail(name, error)
