"""Source: the C heap, from which torch's CPU tensors come.

Both calls hold each arena's lock while they walk its free chunks, at about 60 ns a chunk (2.2 us and 20 us on a small
heap, 12 ms and 16 ms with 200,000 free chunks): reading may take half a thousandth of the time, so a heap in many
pieces is read less than once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvobs.model import AllocatorState, Availability, Emit, Event, Poll
from kvobs.sources import _glibc, _malloc_info

SOURCE = "heap"
LARGEST = "heap: largest free chunk"
INTERVAL_PER_COST = 2000
STALE_NS = 5_000_000_000  # metrics forget a source that has been silent for so long
RARE = "The heap is in so many pieces that it is read less than every five seconds, so its values come and go."
UNREADABLE = "The answer of malloc_info is not understood."


class HeapSource:
    """Polls glibc's malloc; ``find`` and ``clock`` can be replaced.

    The clock is this thread's CPU time (ns): waiting for the GIL, which ctypes takes back after a call, is no cost.
    """

    name = SOURCE

    def __init__(self, find: Callable[[], _glibc.Glibc | str] = _glibc.find,
                 clock: Callable[[], int] = time.thread_time_ns) -> None:
        self._find, self._clock = find, clock
        self._glibc: _glibc.Glibc | None = None
        self._reason = "The heap has not been looked at yet."
        self._next_ns, self._interval_ns = 0, 0
        self._understood = True

    def install(self, emit: Emit) -> None:
        """Look once whether glibc's malloc is the one of this process; nothing is hooked."""
        found = self._find()
        self._glibc, self._reason = (None, found) if isinstance(found, str) else (found, "")
        self._next_ns, self._interval_ns = 0, 0

    def uninstall(self) -> None:
        """Read no more."""
        self._glibc, self._reason = None, "The heap is not observed any more."

    def sample(self, now_ns: int) -> Iterable[Event]:
        """Usage, what could be trimmed, and the state of the allocator that CPU tensors come from."""
        if self._glibc is None or now_ns < self._next_ns:
            return ()
        began = self._clock()
        info = self._glibc.mallinfo()
        text = self._glibc.malloc_info()
        detail = _malloc_info.parse(text)
        self._understood = detail is not None
        cost = self._clock() - began
        self._interval_ns = INTERVAL_PER_COST * cost
        self._next_ns = now_ns + self._interval_ns
        return (
            Poll(now_ns, SOURCE, cost, (
                ("kvobs.heap.usage", ("used",), info.used),
                ("kvobs.heap.usage", ("free",), info.free),
                ("kvobs.heap.usage", ("mapped",), info.mapped),
                ("kvobs.heap.trimmable", (), info.top))),
            AllocatorState(now_ns, "cpu", info.arena + info.mapped, info.used + info.mapped,
                           # While malloc_info counted, the buffer that it writes to was cut from a free chunk.
                           max(detail.largest_free_bytes, info.top) if detail else None),
        )

    def availability(self) -> Iterable[Availability]:
        """Whether the heap is glibc's, whether it is read often enough, and whether its largest free chunk is known."""
        if self._glibc is None:
            yield Availability(SOURCE, False, self._reason)
            return
        yield Availability(SOURCE, True, RARE if self._interval_ns > STALE_NS else "")
        yield Availability(LARGEST, self._understood, "" if self._understood else UNREADABLE)
