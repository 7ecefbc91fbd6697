"""Both engines on programs whose outcome is computed by hand, and what the C++ core refuses."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator import _abi, core
from kvobs.allocator.core import Core, run
from kvobs.allocator.program import (
    ADVANCE,
    ALLOC,
    EMPTY_CACHE,
    FREE,
    RECORD_STREAM,
    RELEASE_POOL,
    SET,
    Outcome,
    Program,
)
from kvobs.allocator.settings import INTERVALS, MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING
from kvobs.allocator.twin import OutOfMemory

REASON = core.why_not()
needs_core = pytest.mark.skipif(REASON is not None, reason=str(REASON))
engines = pytest.mark.parametrize("engine", [pytest.param("C++", marks=needs_core), "Python"])
FIRST, EXPANDABLE = 0x7F00_0000_0000, Settings(expandable_segments=True)


def program(*operations: tuple[Any, ...]) -> Program:
    made = Program()
    for op, *arguments in operations:
        if op == SET:
            made.add(SET, len(made.settings))
            made.settings.extend(arguments)
        else:
            made.add(op, **arguments[0]) if arguments and isinstance(arguments[0], dict) else made.add(op, *arguments)
    return made


def allocs(*sizes: int, start: int = 0) -> list[tuple[Any, ...]]:
    return [(ALLOC, start + index, size) for index, size in enumerate(sizes)]


def frees(*handles: int) -> list[tuple[Any, ...]]:
    return [(FREE, handle) for handle in handles]


def states(outcome: Outcome) -> list[tuple[int, int]]:
    return [(block.size, block.state) for segment in outcome.state for block in segment.blocks]


@engines
def test_small_then_large_needs_twice_the_memory(engine: str) -> None:
    """Eight segments of 16 MiB cannot serve four requests of 32 MiB: 256 MiB; four of 32 MiB serve both: 128 MiB."""
    small, large = [16 * MIB] * 8, [32 * MIB] * 4
    first = program(*allocs(*small), *frees(*range(8)), *allocs(*large, start=8))
    reverse = program(*allocs(*large), *frees(*range(4)), *allocs(*small, start=4))
    assert run(first, Settings(), None, engine).stats.reserved == 256 * MIB
    assert run(reverse, Settings(), None, engine).stats.reserved == 128 * MIB


@engines
def test_rounding_and_segments(engine: str) -> None:
    """Requests round to 512 bytes; up to 1 MiB share 2 MiB, below 10 MiB share 20 MiB, larger ones get their own."""
    outcome = run(program(*allocs(1, 513, MIB, MIB + 1, 10 * MIB, 10 * MIB + 1)), Settings(), None, engine)
    second, third = FIRST + 2 * MIB, FIRST + 22 * MIB
    assert list(outcome.address) == [FIRST, FIRST + 512, FIRST + 1536, second, second + MIB + 512, third]
    assert list(outcome.reserved) == [2 * MIB, 2 * MIB, 2 * MIB, 22 * MIB, 22 * MIB, 34 * MIB]
    assert outcome.stats.requested == 1 + 513 + MIB + (MIB + 1) + 10 * MIB + 10 * MIB + 1
    assert outcome.stats.allocated == 512 + 1024 + MIB + (MIB + 512) + 10 * MIB + (10 * MIB + 512)


@engines
def test_divisions(engine: str) -> None:
    """With four divisions 5,000 bytes take the next of 4,096, 5,120, 6,144, 7,168; up to 2,048 nothing changes."""
    settings = Settings(roundup_power2_divisions=(4,) * INTERVALS)
    assert list(run(program(*allocs(5000, 1200)), settings, None, engine).allocated) == [5120, 5120 + 1536]


@engines
def test_best_fit(engine: str) -> None:
    """The smallest free block that is large enough is taken, of equal ones that at the lower address."""
    sizes = [30 * MIB, 12 * MIB, 20 * MIB, 12 * MIB]
    outcome = run(program(*allocs(*sizes), *frees(3, 2, 1, 0), *allocs(11 * MIB, 11 * MIB, 11 * MIB, start=4)),
                  Settings(), None, engine)
    assert list(outcome.address[8:]) == [FIRST + 30 * MIB, FIRST + 62 * MIB, FIRST + 42 * MIB]


@engines
def test_other_streams_do_not_share(engine: str) -> None:
    """A block that is free on one stream serves no other: the device is asked."""
    outcome = run(program(*allocs(16 * MIB), (FREE, 0), (ALLOC, 1, 16 * MIB, 1)), Settings(), None, engine)
    assert outcome.stats.reserved == 32 * MIB


@engines
def test_pending_until_the_stream_catches_up(engine: str) -> None:
    """A block that another stream uses is free only after that stream, and then at the next request."""
    start = [*allocs(16 * MIB), (RECORD_STREAM, {"handle": 0, "stream": 1}), (FREE, 0)]
    early = run(program(*start, *allocs(16 * MIB, start=1)), Settings(), None, engine)
    assert states(early) == [(16 * MIB, PENDING), (16 * MIB, ALLOCATED)]
    assert (early.stats.allocated, early.stats.active) == (16 * MIB, 32 * MIB)
    passed = run(program(*start, (ADVANCE, {"stream": 1})), Settings(), None, engine)
    assert states(passed) == [(16 * MIB, PENDING)]
    late = run(program(*start, (ADVANCE, {"stream": 1}), *allocs(16 * MIB, start=1)), Settings(), None, engine)
    assert states(late) == [(16 * MIB, ALLOCATED)]
    own = run(program(*allocs(16 * MIB), (RECORD_STREAM, {"handle": 0, "stream": 0}), (FREE, 0)), Settings(), None,
              engine)
    assert states(own) == [(16 * MIB, INACTIVE)]


@engines
def test_out_of_memory_comes_last(engine: str) -> None:
    """Before a request fails, streams are waited for and free segments are given back; what is split stays."""
    held = [*allocs(16 * MIB, 6 * MIB, 30 * MIB), (RECORD_STREAM, {"handle": 2, "stream": 1}), *frees(0, 2)]
    served = run(program(*held, *allocs(44 * MIB, start=3)), Settings(), 66 * MIB, engine)
    assert (served.stats.retries, served.stats.syncs, served.stats.device_frees) == (1, 1, 2)
    assert served.stats.reserved == 64 * MIB
    failed = run(program(*held, *allocs(48 * MIB, start=3), (FREE, 3)), Settings(), 66 * MIB, engine)
    assert failed.ooms == (6,)
    assert failed.address[6] == 0
    assert (failed.stats.ooms, failed.stats.reserved) == (1, 20 * MIB)


@engines
def test_expandable_segment_grows_and_shrinks(engine: str) -> None:
    """An expandable segment grows by whole pages of 20 MiB at one place, and gives whole pages back."""
    sizes = [16 * MIB, 6 * MIB, 30 * MIB]
    grown = run(program(*allocs(*sizes)), EXPANDABLE, 200 * MIB, engine)
    assert list(grown.reserved) == [20 * MIB, 40 * MIB, 60 * MIB]
    assert len(grown.state) == 1
    assert [address - grown.address[0] for address in grown.address] == [0, 16 * MIB, 22 * MIB]
    shrunk = run(program(*allocs(*sizes), *frees(2), (EMPTY_CACHE,)), EXPANDABLE, 200 * MIB, engine)
    assert states(shrunk) == [(16 * MIB, ALLOCATED), (6 * MIB, ALLOCATED), (18 * MIB, INACTIVE)]
    assert shrunk.stats.reserved == 40 * MIB


@engines
def test_small_block_in_a_large_expandable_segment(engine: str) -> None:
    """With expandable segments the large pool too splits off 512 bytes; else a rest of 1 MiB stays with its block."""
    sizes = [20 * MIB - 512]
    split, whole = (run(program(*allocs(*sizes)), settings, None, engine) for settings in (EXPANDABLE, Settings()))
    assert states(split) == [(20 * MIB - 512, ALLOCATED), (512, INACTIVE)]
    assert states(whole) == [(20 * MIB, ALLOCATED)]


@engines
def test_failed_growth_keeps_what_was_mapped(engine: str) -> None:
    """Pages that were mapped for a request which then failed stay with the allocator until they are given back."""
    give_back = [(RELEASE_POOL, {"pool": 1}), (EMPTY_CACHE,)]
    # Of the range's four pages the first is unmapped, two are free, and the last was never mapped.
    held = [*[(ALLOC, at, 20 * MIB, 0, 1) for at in range(3)], *frees(0), *give_back, *frees(1, 2)]
    failed = [*held, (ALLOC, 3, 80 * MIB, 0, 1)]
    outcome = run(program(*failed), EXPANDABLE, 70 * MIB, engine)
    assert outcome.ooms == (8,)
    assert list(outcome.reserved[7:]) == [40 * MIB, 60 * MIB]
    assert states(outcome) == [(60 * MIB, INACTIVE)]
    assert run(program(*failed, *give_back), EXPANDABLE, 70 * MIB, engine).stats.reserved == 0
    default = run(program(*allocs(20 * MIB, 20 * MIB, 20 * MIB), *frees(0, 1), (EMPTY_CACHE,),
                          *allocs(60 * MIB, start=3)), EXPANDABLE, 70 * MIB, engine)
    assert default.ooms == (6,)
    assert default.stats.reserved == 20 * MIB  # none of 60 MiB at once


@engines
def test_oversize_blocks(engine: str) -> None:
    """Blocks of max_split_size or more stay whole, serve what is less than 20 MiB smaller, and go back one by one."""
    settings = Settings(max_split_size=30 * MIB)
    outcome = run(program(*allocs(60 * MIB), (FREE, 0), *allocs(20 * MIB, 40 * MIB, 40 * MIB + 512, start=1)), settings,
                  None, engine)
    assert list(outcome.reserved[2:]) == [80 * MIB, 120 * MIB, 120 * MIB]
    released = run(program(*allocs(60 * MIB, 40 * MIB), *frees(0, 1), *allocs(20 * MIB, start=2)), settings, 100 * MIB,
                   engine)
    assert (released.stats.reserved, released.stats.syncs) == (80 * MIB, 0)


@engines
def test_memory_fraction(engine: str) -> None:
    """A process may not reserve more than its fraction of the device, whatever the device has left."""
    outcome = run(program(*allocs(40 * MIB, 30 * MIB)), Settings(memory_fraction=0.5), 128 * MIB, engine)
    assert outcome.ooms == (1,)


@engines
def test_garbage_collection_returns_the_old(engine: str) -> None:
    """Above the threshold, segments unused for at least the average number of look-ups go back before the device is
    asked: the one freed first, not the one freed last.
    """
    settings = Settings(memory_fraction=1.0, garbage_collection_threshold=0.5)
    held = [*allocs(20 * MIB, 30 * MIB), (FREE, 0), *allocs(*[512] * 20, start=2),
            *[(ALLOC, 22 + at, 60 * MIB, 1) if not at % 2 else (FREE, 21 + at) for at in range(10)], (FREE, 1)]
    outcome = run(program(*held, (ALLOC, 31, 40 * MIB, 2)), settings, 200 * MIB, engine)
    assert outcome.stats.syncs == 0
    assert sorted(segment.size for segment in outcome.state) == [2 * MIB, 30 * MIB, 40 * MIB, 60 * MIB]


@engines
def test_private_pools(engine: str) -> None:
    """A private pool keeps its segments until it is released, and its requests do not wait for the device."""
    pooled = [(ALLOC, 0, 16 * MIB, 0, 1), (FREE, 0), (EMPTY_CACHE,)]
    assert run(program(*pooled), Settings(), None, engine).stats.reserved == 16 * MIB
    released = program(*pooled, (RELEASE_POOL, {"pool": 1}), (EMPTY_CACHE,))
    assert run(released, Settings(), None, engine).stats.reserved == 0
    cached = run(program(*allocs(16 * MIB), (FREE, 0), (ALLOC, 1, 16 * MIB, 0, 1)), Settings(), 20 * MIB, engine)
    assert (cached.ooms, cached.stats.syncs, cached.stats.reserved) == ((2,), 0, 16 * MIB)


@engines
def test_settings_change_in_the_middle(engine: str) -> None:
    """With expandable segments switched off, their free blocks serve nobody; switched on again, they do."""
    outcome = run(program(*allocs(16 * MIB), (FREE, 0), (SET, Settings()), *allocs(16 * MIB, start=1),
                          (SET, EXPANDABLE), *allocs(16 * MIB, start=2)), EXPANDABLE, None, engine)
    assert outcome.address[3] == FIRST
    assert outcome.address[5] == outcome.address[0]


@engines
@pytest.mark.parametrize("wrong", [
    [(FREE, 0)], [(RECORD_STREAM, 0)], [*allocs(1), (FREE, 0), (FREE, 0)], [*allocs(1), (ALLOC, 0, 1)],
    [(ALLOC, -1, 1)], [(ALLOC, 7, 1)], [(ALLOC, 0, -1)], [(ALLOC, 0, 1 << 60)], [(FREE, 1 << 40)], [(99,)],
    [*allocs(1), (FREE, 0), (RECORD_STREAM, 0)]])
def test_what_is_no_program_is_refused(engine: str, wrong: list[tuple[Any, ...]]) -> None:
    """An operation on what is not allocated, or with an impossible size or handle, is refused by its number."""
    with pytest.raises(ValueError, match=f"operation {len(wrong) - 1} of the program is not allowed"):
        run(program(*wrong), Settings(), None, engine)


@engines
def test_a_change_to_settings_that_are_not_there_is_refused(engine: str) -> None:
    """SET must name one of the program's settings."""
    made = Program()
    made.add(SET, 0)
    with pytest.raises(ValueError, match="operation 0 of the program"):
        run(made, Settings(), None, engine)


@engines
def test_an_empty_program(engine: str) -> None:
    """No operation, no state."""
    outcome = run(Program(), Settings(), None, engine)
    assert (outcome.state, outcome.ooms, len(outcome.address), outcome.stats.reserved) == ((), (), 0, 0)


@needs_core
@pytest.mark.parametrize("settings", [
    Settings(memory_fraction=2.0), Settings(memory_fraction=float("nan")), Settings(large_segment_size=MIB),
    Settings(garbage_collection_threshold=-1.0), Settings(max_non_split_rounding=1 << 62)])
def test_settings_out_of_range_are_refused(settings: Settings) -> None:
    """The core takes no settings with which its sums could overflow or its rules have no meaning."""
    with pytest.raises(ValueError, match="out of range"):
        Core(settings)
    used = Core()
    with pytest.raises(ValueError, match="refuses"):
        used.set(settings)


@needs_core
def test_addresses_that_are_not_live_are_refused() -> None:
    """Every call with an address that was never given, or was given back, is a KeyError and changes nothing."""
    used = Core()
    address = used.alloc(MIB)
    before = used.snapshot()
    calls: list[Callable[[int], None]] = [used.free, used.defer, used.complete]
    for call in calls:
        with pytest.raises(KeyError):
            call(address + 512)
    with pytest.raises(KeyError):
        used.record_stream(address + 512, 1)
    with pytest.raises(KeyError):
        used.complete(address)
    with pytest.raises(ValueError, match="refuses a request of -1 bytes"):
        used.alloc(-1)
    with pytest.raises(ValueError, match="refuses a request"):
        used.alloc(1 << 64)
    assert used.snapshot() == before
    with pytest.raises(OutOfMemory):
        Core(capacity=MIB).alloc(1)
    with pytest.raises(ValueError, match="not allowed"):
        Core(capacity=0)


@needs_core
def test_null_pointers_are_refused() -> None:
    """The C ABI answers a missing instance or argument with its code instead of touching it."""
    library: Any = core._library()
    used = Core()
    handle, number = used._handle, ctypes.c_int64()
    assert library.kvobs_empty_cache(None) == _abi.INVALID
    assert library.kvobs_alloc(handle, 0, 0, 1, None) == _abi.INVALID
    assert library.kvobs_set(handle, None) == _abi.INVALID
    assert library.kvobs_get_stats(handle, None) == _abi.INVALID
    assert library.kvobs_snapshot_size(handle, None, None) == _abi.INVALID
    assert library.kvobs_open_pool(handle, 0) == _abi.INVALID
    assert library.kvobs_release_pool(handle, 3) == _abi.UNKNOWN
    assert library.kvobs_run(handle, 1, *[None] * 5, None, 0, *[None] * 3, ctypes.byref(number)) == _abi.INVALID
    assert library.kvobs_run(handle, -1, *[None] * 5, None, 0, *[None] * 3, ctypes.byref(number)) == _abi.INVALID
    assert not library.kvobs_create(None, 0, None)
    assert not library.kvobs_create(ctypes.byref(_abi.settings_struct(Settings())), 1 << 62, None)
    library.kvobs_destroy(None)


@needs_core
def test_a_pool_that_two_opened_is_released_by_both() -> None:
    """A private pool's segments may go back once everyone who opened it has released it."""
    library: Any = core._library()
    used = Core()
    assert library.kvobs_open_pool(used._handle, 1) == _abi.OK
    assert library.kvobs_open_pool(used._handle, 1) == _abi.OK
    used.free(used.alloc(16 * MIB, 0, 1))
    used.release_pool(1)
    used.empty_cache()
    assert used.stats().reserved == 16 * MIB
    used.release_pool(1)
    used.empty_cache()
    assert used.stats().reserved == 0


def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the core "auto" is the twin and "C++" says why not; an unknown engine is refused."""
    assert core.engine("Python") == "Python"
    with pytest.raises(ValueError, match="'fast' is no engine"):
        core.engine("fast")
    monkeypatch.setenv("KVOBS_NATIVE", "off")
    assert core.engine() == "Python"
    assert core.why_not() == "The C++ core is switched off (native=off)."
    with pytest.raises(ValueError, match="switched off"):
        core.engine("C++")
    with pytest.raises(ValueError, match="switched off"):
        Core()
    assert run(program(*allocs(1)), Settings()).engine == "Python"


def test_switched_off_in_the_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config file switches the core off as the environment does, and a setting that is refused is the reason."""
    file = tmp_path / "kvobs.toml"
    file.write_text('native = "off"\n')
    monkeypatch.setenv("KVOBS_CONFIG", str(file))
    assert core.engine() == "Python"
    assert core.why_not() == "The C++ core is switched off (native=off)."
    monkeypatch.setenv("KVOBS_NATIVE", "auto")  # the environment precedes the file
    assert core.why_not() == REASON
    monkeypatch.setenv("KVOBS_NATIVE", "no")
    assert core.engine() == "Python"
    assert core.why_not() == "The setting 'native' from KVOBS_NATIVE is 'no'; allowed is auto or off."


def test_the_columns_are_as_wide_as_the_core_reads_them() -> None:
    """The core reads columns in place: uint8_t, three of int64_t, and int32_t."""
    made = Program()
    widths = [column.itemsize for column in (made.op, made.handle, made.size, made.stream, made.pool)]
    assert widths == [1, 8, 8, 8, 4]
    assert array("q").itemsize == ctypes.sizeof(ctypes.c_int64)
