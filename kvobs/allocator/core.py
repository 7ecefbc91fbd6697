"""The C++ core, and which of the two engines serves: the core where it can be had, else the Python twin."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any, cast

from kvobs.allocator import _abi, twin
from kvobs.allocator import program as operations
from kvobs.allocator._build import BuildError, library
from kvobs.allocator.device import Device, SimulatedDevice
from kvobs.allocator.program import Outcome, Program, Stats
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import Block, Segment, State
from kvobs.allocator.twin import OutOfMemory
from kvobs.config import ConfigError, load

ENGINES = ("auto", "C++", "Python")
LARGEST = 1 << 60  # bytes: a request must be smaller, so that the core's sums cannot overflow
_found: ctypes.CDLL | str | None = None  # the library, or why there is none; None before the first use


def engine(wanted: str = "auto") -> str:
    """The engine that serves, "C++" or "Python". The first call of a machine compiles the core (about 3 s).

    Raises:
        ValueError: there is no such engine, or it was asked for and cannot be had.
    """
    if wanted not in ENGINES:
        raise ValueError(f"'{wanted}' is no engine; auto, C++ and Python are")
    if wanted == "Python":
        return wanted
    reason = why_not()
    if reason is not None and wanted == "C++":
        raise ValueError(reason)
    return "C++" if reason is None else "Python"


def why_not() -> str | None:
    """Why the C++ core cannot be had, in a sentence; None if it can."""
    try:
        if load().native == "off":
            return "The C++ core is switched off (native=off)."
    except ConfigError as error:
        return str(error)
    found = _library()
    return found if isinstance(found, str) else None


def run(program: Program, settings: Settings, capacity: int | None = None, engine: str = "auto") -> Outcome:
    """Run a program on a new allocator with a simulated device of ``capacity`` bytes (None: without limit).

    Raises:
        ValueError: the program is none (an operation on a handle that is not allocated, a size below zero …), or the
            engine cannot be had.
    """
    if _choose(engine) == "Python":
        return _run_twin(program, settings, capacity)
    return Core(settings, capacity).run(program)


class Core:
    """The C++ allocator, on a simulated device of ``capacity`` bytes or on a given ``device`` that has them; the
    methods of ``twin.Allocator``.

    One thread at a time. Freed with the object.
    """

    def __init__(self, settings: Settings | None = None, capacity: int | None = None,
                 device: Device | None = None) -> None:
        self._handle: int | None = None
        reason = why_not()
        if reason is not None:
            raise ValueError(reason)
        if capacity is not None and capacity <= 0:
            raise ValueError(f"a capacity of {capacity} bytes is not allowed; more than 0, or None for no limit")
        self._library = cast("Any", _library())
        own = settings or Settings()
        self._table = None if device is None else _abi.device_struct(device)
        self._handle = self._library.kvobs_create(
            ctypes.byref(_abi.settings_struct(own)), capacity or 0,
            None if self._table is None else ctypes.byref(self._table))
        if not self._handle:
            raise ValueError(f"these settings are out of range: {own}, a capacity of {capacity} bytes")

    def __del__(self) -> None:
        if self._handle:
            self._library.kvobs_destroy(self._handle)
            self._handle = None

    def alloc(self, size: int, stream: int = 0, pool: int = 0) -> int:
        """Serve a request; returns its address.

        Raises:
            OutOfMemory: nothing could serve it.
        """
        address = ctypes.c_uint64()
        code = self._library.kvobs_alloc(self._handle, stream, pool, _int64(size), ctypes.byref(address))
        if code == _abi.OUT_OF_MEMORY:
            raise OutOfMemory(f"{size} bytes on stream {stream}")
        check(code, f"a request of {size} bytes")
        return address.value

    def free(self, address: int) -> None:
        """Give a block back: at once, or when the streams that use it have caught up."""
        check(self._library.kvobs_free(self._handle, address), address)

    def record_stream(self, address: int, stream: int) -> None:
        """Say that another stream uses a block too."""
        check(self._library.kvobs_record_stream(self._handle, address, stream), address)

    def advance(self, stream: int) -> None:
        """Say that the device has done everything queued on a stream; blocks become free at the next request."""
        check(self._library.kvobs_advance(self._handle, stream), stream)

    def empty_cache(self) -> None:
        """Return every segment to the device that holds nothing."""
        check(self._library.kvobs_empty_cache(self._handle), "empty_cache")

    def release_pool(self, pool: int) -> None:
        """Say that no graph uses a private pool any more: its segments may be returned."""
        code = self._library.kvobs_release_pool(self._handle, pool)
        if code != _abi.UNKNOWN:  # nothing was ever allocated there
            check(code, pool)

    def set(self, settings: Settings) -> None:
        """Change the settings; what is allocated stays where it is."""
        check(self._library.kvobs_set(self._handle, ctypes.byref(_abi.settings_struct(settings))), settings)

    def defer(self, address: int) -> None:
        """Give a block back that something still uses; ``complete`` will say when it is free."""
        check(self._library.kvobs_defer(self._handle, address), address)

    def complete(self, address: int) -> None:
        """Say that a deferred block is free."""
        check(self._library.kvobs_complete(self._handle, address), address)

    def stats(self) -> Stats:
        """Totals now."""
        found = _abi.CStats()
        check(self._library.kvobs_get_stats(self._handle, ctypes.byref(found)), "stats")
        return Stats(*(getattr(found, name) for name in _abi.STATS))

    def snapshot(self) -> State:
        """Segments and blocks now, as ``torch.cuda.memory_snapshot`` tells them."""
        segments, blocks = ctypes.c_int64(), ctypes.c_int64()
        check(self._library.kvobs_snapshot_size(self._handle, ctypes.byref(segments), ctypes.byref(blocks)),
               "snapshot")
        heads = zeros("q", segments.value * _abi.SEGMENT_FIELDS)
        parts = zeros("q", blocks.value * _abi.BLOCK_FIELDS)
        check(self._library.kvobs_snapshot(self._handle, pointer(heads), pointer(parts)), "snapshot")
        return _state(heads, parts)

    def run(self, program: Program) -> Outcome:
        """Run a program.

        Raises:
            ValueError: an operation is not allowed.
        """
        count = len(program)
        address, reserved, allocated = (zeros("q", count) for _ in range(3))
        changes = (_abi.CSettings * len(program.settings))(*map(_abi.settings_struct, program.settings))
        done = ctypes.c_int64()
        columns = [pointer(column) for column in (program.op, program.handle, program.size, program.stream,
                                                   program.pool)]
        code = self._library.kvobs_run(
            self._handle, count, *columns, changes, len(changes), pointer(address), pointer(reserved),
            pointer(allocated), ctypes.byref(done))
        if code == _abi.INVALID:
            raise _refused(program, done.value)
        check(code, "a program")
        stats = self.stats()
        return Outcome(address, reserved, allocated, _ooms(program, address, stats.ooms), stats, self.snapshot(),
                       "C++")


_choose = engine  # ``run`` has a parameter of that name


def _library() -> ctypes.CDLL | str:
    global _found
    if _found is None:
        try:
            _found = _abi.declare(library())
        except (BuildError, OSError) as error:
            _found = str(error)
    return _found


def _run_twin(program: Program, settings: Settings, capacity: int | None) -> Outcome:
    allocator = twin.Allocator(settings, SimulatedDevice(capacity))
    count = len(program)
    address, reserved, allocated = (zeros("q", count) for _ in range(3))
    ooms: list[int] = []
    given: dict[int, int] = {}  # by handle: the address, 0 where there was no memory, -1 once freed
    columns = zip(program.op, program.handle, program.size, program.stream, program.pool, strict=True)
    for index, (op, handle, size, stream, pool) in enumerate(columns):
        if op == operations.ALLOC:
            if handle in given or not 0 <= handle < count or not 0 <= size < LARGEST:
                raise _refused(program, index)
            try:
                given[handle] = address[index] = allocator.alloc(size, stream, pool)
            except OutOfMemory:
                ooms.append(index)
                given[handle] = 0
        elif op == operations.FREE:
            place = given.get(handle, -1)
            if place < 0:
                raise _refused(program, index)
            if place:
                allocator.free(place)
                given[handle] = -1
        elif op == operations.RECORD_STREAM:
            place = given.get(handle, -1)
            if place < 0:
                raise _refused(program, index)
            if place:
                allocator.record_stream(place, stream)
        elif op == operations.ADVANCE:
            allocator.advance(stream)
        elif op == operations.EMPTY_CACHE:
            allocator.empty_cache()
        elif op == operations.RELEASE_POOL:
            allocator.release_pool(pool)
        elif op == operations.SET and 0 <= handle < len(program.settings):
            allocator.set(program.settings[handle])
        else:
            raise _refused(program, index)
        reserved[index] = allocator.reserved
        allocated[index] = allocator.allocated
    return Outcome(address, reserved, allocated, tuple(ooms), allocator.stats(), allocator.snapshot(), "Python")


def _refused(program: Program, index: int) -> ValueError:
    return ValueError(f"operation {index} of the program is not allowed: op {program.op[index]}, handle "
                      f"{program.handle[index]}, {program.size[index]} bytes")


def _ooms(program: Program, address: array[int], count: int) -> tuple[int, ...]:
    if not count:
        return ()
    return tuple(index for index, (op, at) in enumerate(zip(program.op, address, strict=True))
                 if op == operations.ALLOC and at == 0)


def _state(heads: array[int], parts: array[int]) -> State:
    segments: list[Segment] = []
    place, width = 0, _abi.BLOCK_FIELDS
    for start in range(0, len(heads), _abi.SEGMENT_FIELDS):
        address, size, stream, pool, small, expandable, count = heads[start:start + _abi.SEGMENT_FIELDS]
        blocks = tuple(Block(*parts[at:at + width]) for at in range(place, place + count * width, width))
        place += count * width
        segments.append(Segment(address, size, stream, pool, bool(small), bool(expandable), blocks))
    return tuple(segments)


def zeros(code: str, count: int) -> array[int]:
    """A column for the core to write to, of 8 bytes an entry."""
    return array(code, bytes(8 * count))


def pointer(column: array[int]) -> int:
    """Where a column lies; it must outlive the call and keep its length."""
    return column.buffer_info()[0]


def _int64(value: int) -> int:
    """The value, or one that the core refuses where C would cut it down to another one."""
    return value if 0 <= value < 1 << 63 else -1


def check(code: int, what: object) -> None:
    """Turn a code of the core into the exception that it means."""
    if code == _abi.OK:
        return
    if code == _abi.UNKNOWN:
        raise KeyError(what)
    if code == _abi.BROKEN:
        raise MemoryError("the C++ core ran out of host memory in the middle of a change and is no longer usable")
    raise ValueError(f"the core refuses {what}")
