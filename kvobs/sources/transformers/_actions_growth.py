"""How growing layers grow, changed from outside: in chunks instead of by concatenation; and back from the host first.

``DynamicLayer.update`` makes new K and V of the whole length for each token. In chunks, K and V are views of larger
buffers, and a token is written into the spare room behind them; attention sees the same shapes and values. A buffer is
written to only behind what was last shown, and only where the layer still shows exactly that view: whatever crops,
reorders, selects or replaces it gets a buffer of its own at the next step, as it would have with concatenation.

While some layers' K and V lie in host memory, the methods that rearrange or copy a layer bring it back first, whoever
calls them: so it is right also where no hook of kvobs sees the pass.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from kvobs.model import Emit, HookFailed
from kvobs.sources._patch import Patches
from kvobs.sources._torch_handle import CUDA
from kvobs.sources.transformers._caches import SOURCE

CHUNK, SHARE = 64, 4  # spare rows: at least so many, and a quarter of the rows, so that copies are amortised
HOST = "cpu"
_REARRANGE = ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "__reduce_ex__")
_CLASSES = ("DynamicLayer", "DynamicSlidingWindowLayer")

Function = Callable[..., Any]
_log = logging.getLogger("kvobs")


class _Room:
    """A layer's buffers, and the views of them that it showed last."""

    __slots__ = ("keys", "seen_keys", "seen_values", "values")

    def __init__(self, keys: Any, values: Any) -> None:
        self.keys, self.values = keys, values
        self.seen_keys: Any = None
        self.seen_values: Any = None


def room_for(rows: int) -> int:
    """The token positions of a buffer that ``rows`` are to go into."""
    return rows + max(CHUNK, rows // SHARE)


class Growth:
    """Patches the layer classes of ``transformers.cache_utils`` while there is a reason to."""

    def __init__(self, emit: Emit, is_compiling: Callable[[], bool]) -> None:
        self._emit, self._is_compiling = emit, is_compiling
        self._patches = Patches(SOURCE, emit)
        self._rooms: weakref.WeakKeyDictionary[Any, _Room] = weakref.WeakKeyDictionary()
        self._away: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()
        self.classes: tuple[type, ...] = ()
        self.chunked = False

    def known(self, module: Any) -> None:
        """The module of transformers that has the layer classes."""
        self.classes = tuple(getattr(module, name) for name in _CLASSES if hasattr(module, name))

    def movable(self, layer: Any) -> bool:
        """Is it of a class whose K and V can be replaced by equal ones at any time between passes?"""
        return type(layer) in self.classes or self.growing(layer)

    def growing(self, layer: Any) -> bool:
        """Does it grow without bound, by concatenation?"""
        return bool(self.classes) and (type(layer) is self.classes[0] or getattr(layer, "kvobs_cut", False))

    # -- switches --------------------------------------------------------------------------------------

    def chunks(self) -> None:
        """Grow in chunks from the next step on."""
        with self._lock:
            self.chunked = True
            self._patch()

    def plain(self) -> None:
        """Grow by concatenation from the next step on; what has spare room keeps it until then."""
        with self._lock:
            self.chunked = False
            self._rooms.clear()
            self._unpatch()

    def spare(self, layer: Any) -> bool:
        """Does it show a view of a buffer that it is about to grow into?"""
        room = self._rooms.get(layer)
        return room is not None and layer.keys is room.seen_keys and layer.values is room.seen_values

    def forget(self, layer: Any) -> None:
        """Its K and V were replaced: the buffer serves nobody any more."""
        self._rooms.pop(layer, None)

    def any_away(self) -> bool:
        """Does some layer lie in host memory?"""
        return bool(len(self._away))

    def left(self, layer: Any) -> None:
        """Its K and V go to host memory (told before they do)."""
        with self._lock:
            self._away.add(layer)
            self._patch()

    def is_away(self, layer: Any) -> bool:
        """Was it moved to host memory, and not been brought back?"""
        return layer in self._away

    def back(self, layer: Any) -> None:
        """Bring K and V back to the layer's device; torch's own errors pass, and it stays away then.

        Whoever comes first does it, and others wait: what it then grows into must not be replaced once more.
        """
        if layer not in self._away:
            return
        with self._lock:
            if layer not in self._away:
                return
            if layer.is_initialized:
                for name in ("keys", "values"):
                    tensor = getattr(layer, name)
                    if tensor.device.type == HOST:
                        setattr(layer, name, tensor.to(layer.device, non_blocking=True))
                _finish(layer.device)
            self._away.discard(layer)
            self._unpatch()

    def _patch(self) -> None:
        for owner in self.classes:
            if "update" in vars(owner):
                self._patches.wrap(owner, "update", self._update)
            for name in _REARRANGE:
                if name in vars(owner) or owner is self.classes[0]:
                    self._patches.wrap(owner, name, self._after_back)

    def _unpatch(self) -> None:
        if not self.chunked and not len(self._away):
            self._patches.restore()

    def after_fork_in_child(self) -> None:
        """A thread of the parent may have held the locks."""
        self._lock = threading.RLock()
        self._patches.after_fork_in_child()

    # -- the engine's thread ---------------------------------------------------------------------------

    def _after_back(self, original: Function) -> Function:
        is_compiling, back = self._is_compiling, self.back

        def method(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                back(layer)
            return original(layer, *args, **kwargs)

        return method

    def _update(self, original: Function) -> Function:
        is_compiling, growth = self._is_compiling, self

        def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(self, key_states, value_states, *args, **kwargs)
            growth.back(self)
            if growth.chunked and growth.growing(self):
                try:
                    shown = growth._grow(self, key_states, value_states)
                except Exception as error:
                    growth._give_up(error)
                    shown = None
                if shown is not None:
                    return shown
            return original(self, key_states, value_states, *args, **kwargs)

        return update

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return  # concatenation needs less room, and says it itself where even that is not there
        self.chunked = False
        _log.warning("kvobs: growth in chunks raised %s: %s; it is off, the process is not affected.",
                     type(error).__name__, error)
        self._emit(HookFailed(time.monotonic_ns(), SOURCE, "DynamicLayer.update", f"{type(error).__name__}: {error}"))

    def _grow(self, layer: Any, keys: Any, values: Any) -> tuple[Any, Any] | None:
        """What the layer holds with the new states behind it; None where concatenation has to do it."""
        if not _plain(keys) or not _plain(values):
            return None
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        held = layer.keys.shape[-2] if layer.keys.numel() else 0
        rows = held + keys.shape[-2]
        room = self._rooms.get(layer)
        if room is None or not self.spare(layer) or not (
                _fits(room.keys, keys, rows) and _fits(room.values, values, rows)):
            if held and not (_alike(layer.keys, keys) and _alike(layer.values, values)):
                return None
            room = _Room(_buffer(layer.keys, keys, held, rows), _buffer(layer.values, values, held, rows))
            self._rooms[layer] = room
        room.keys[:, :, held:rows] = keys
        room.values[:, :, held:rows] = values
        room.seen_keys, room.seen_values = room.keys[:, :, :rows], room.values[:, :, :rows]
        layer.keys, layer.values = room.seen_keys, room.seen_values
        return room.seen_keys, room.seen_values


def _finish(device: Any) -> None:
    """Other threads may use other streams."""
    if device.type == CUDA:
        import torch

        torch.cuda.current_stream(device).synchronize()


def _plain(states: Any) -> bool:
    """Can it be written into a buffer without anybody noticing? Autograd would; stand-ins have no memory."""
    import torch

    return type(states) is torch.Tensor and states.dim() == 4 and not torch.is_grad_enabled()


def _alike(held: Any, states: Any) -> bool:
    return bool(held.dim() == 4 and held.shape[:2] == states.shape[:2] and held.shape[3] == states.shape[3]
                and held.dtype == states.dtype and held.device == states.device)


def _fits(buffer: Any, states: Any, rows: int) -> bool:
    import torch

    return _alike(buffer, states) and rows <= buffer.shape[2] and (
        not buffer.is_inference() or torch.is_inference_mode_enabled())


def _buffer(held: Any, states: Any, length: int, rows: int) -> Any:
    batch, heads, _, width = states.shape
    made = states.new_empty((batch, heads, room_for(rows), width))
    if length:
        made[:, :, :length] = held
    return made
