"""Being called when an accelerator's allocator runs out of memory, and not any more.

The observers of some kinds (CUDA's) cannot be detached. So one trampoline per process and kind is attached, which asks
who listens now; where it can be detached that is done when nobody does. It is attached right after CUDA is initialised,
by whoever initialises it; for another kind, whose host has it initialised, at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from kvobs.sources._torch_handle import CUDA

WAITING = "Out-of-memory errors are told once the host has initialised CUDA."
REFUSED = "The allocator takes no out-of-memory observer ({error})."
NO_OBSERVER = "torch.{kind} takes no out-of-memory observer."
_QUEUE_S = 1.0
Observer = Callable[[int, int, int, int], None]


class _Line(NamedTuple):
    torch: Any
    kind: str
    trampoline: Observer


_listening: dict[str, weakref.ref[Listener]] = {}
_attached: list[_Line] = []  # of torch modules that call the trampoline, some for the rest of the process


def _trampoline(kind: str, device: int, requested: int, allowed: int, free: int) -> None:
    listener = _listener(kind)
    if listener is not None:
        listener.call(device, requested, allowed, free)


def _listener(kind: str) -> Listener | None:
    found = _listening.get(kind)
    return found() if found is not None else None


class Listener:
    """Has ``call`` called at each error, with device, bytes requested, bytes allowed and bytes free.

    ``reason`` says why it cannot be, and is empty when it can.
    """

    def __init__(self, torch: Any, kind: str, call: Observer) -> None:
        self._torch, self._kind = torch, kind
        self._call = weakref.WeakMethod(call)
        self._deferred = self._attach  # one object, to be found again in torch's queue
        self.reason = WAITING

    def call(self, device: int, requested: int, allowed: int, free: int) -> None:
        """An allocation failed for good."""
        call = self._call()
        if call is not None:
            call(device, requested, allowed, free)

    def start(self) -> None:
        """Listen, instead of whoever has listened to this kind before."""
        _listening[self._kind] = weakref.ref(self)
        if self._kind == CUDA:
            self._torch.cuda._lazy_call(self._deferred)
        else:
            self._attach()

    def stop(self) -> None:
        """Listen no more; what still waits for CUDA is taken back, and what can be detached is."""
        self._leave()
        if self._kind == CUDA:
            self._unqueue()
        elif _listener(self._kind) is None:
            self._detach()

    def fail(self, reason: str) -> None:
        """Listen no more, as ``reason`` says; called inside an error, when nothing can be detached."""
        self._leave()
        self.reason = reason

    def _leave(self) -> None:
        if _listener(self._kind) in (self, None):
            _listening.pop(self._kind, None)

    def _unqueue(self) -> None:
        cuda = self._torch.cuda
        # While torch initialises CUDA it walks this list, which must not change then: the entry does nothing any more.
        if cuda._initialization_lock.acquire(timeout=_QUEUE_S):
            try:
                cuda._queued_calls[:] = [entry for entry in cuda._queued_calls if entry[0] is not self._deferred]
            finally:
                cuda._initialization_lock.release()

    def _attach(self) -> None:
        """Runs inside torch's initialisation of CUDA, which an exception would break."""
        try:
            if _listener(self._kind) is not self:
                return
            if self._line() is None:
                module = getattr(self._torch, self._kind, None)
                attach = (self._torch._C._cuda_attach_out_of_memory_observer if self._kind == CUDA else
                          getattr(module, "attach_out_of_memory_observer", None))
                if attach is None:
                    self.reason = NO_OBSERVER.format(kind=self._kind)
                    return
                line = _Line(self._torch, self._kind, functools.partial(_trampoline, self._kind))
                attach(line.trampoline)
                _attached.append(line)
            self.reason = ""
        except Exception as error:
            self.reason = REFUSED.format(error=type(error).__name__)

    def _detach(self) -> None:
        line, module = self._line(), getattr(self._torch, self._kind, None)
        detach = getattr(module, "detach_out_of_memory_observer", None)
        if line is None or detach is None:
            return
        try:
            detach(line.trampoline)
        except Exception:
            return  # it stays attached, and nobody listens
        _attached.remove(line)

    def _line(self) -> _Line | None:
        return next((line for line in _attached if line.torch is self._torch and line.kind == self._kind), None)
