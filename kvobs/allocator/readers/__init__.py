"""Reading what others recorded: snapshots of torch's allocator, files of profilers. Nothing in them is trusted."""

from __future__ import annotations

TYPE_CHECKING = False  # the child that reads a file imports this package too, and must start fast
if TYPE_CHECKING:
    from kvobs.allocator.readers._parent import Unreadable, read

__all__ = ["Unreadable", "read"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from kvobs.allocator.readers import _parent

        return getattr(_parent, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
