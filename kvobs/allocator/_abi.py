"""The C++ core's ABI (``native/kvobs_core.h``) in ctypes."""

from __future__ import annotations

import ctypes
from ctypes import CFUNCTYPE, POINTER, c_double, c_int, c_int64, c_uint64, c_void_p
from dataclasses import fields

from kvobs.allocator.device import Device
from kvobs.allocator.program import Stats
from kvobs.allocator.settings import INTERVALS, Settings

VERSION = 2
UNLIMITED = (1 << 64) - 1
OK, OUT_OF_MEMORY, INVALID, UNKNOWN, BROKEN = 0, 1, -1, -2, -3


class CSettings(ctypes.Structure):
    """Settings as the core takes them."""

    _fields_ = (
        ("max_split_size", c_uint64), ("max_non_split_rounding", c_uint64), ("large_segment_size", c_uint64),
        ("garbage_collection_threshold", c_double), ("memory_fraction", c_double), ("expandable_segments", c_int64),
        ("roundup_power2_divisions", c_uint64 * INTERVALS))


STATS = tuple(field.name for field in fields(Stats))


class CStats(ctypes.Structure):
    """Totals of an allocator, in the order of ``Stats``."""

    _fields_ = tuple((name, c_int64) for name in STATS)


ADDRESS_OF_SIZE = CFUNCTYPE(c_uint64, c_void_p, c_uint64)
NOTHING_OF_RANGE = CFUNCTYPE(None, c_void_p, c_uint64, c_uint64)
TRUTH_OF_RANGE = CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64)


class CDevice(ctypes.Structure):
    """A device's calls as the core makes them."""

    _fields_ = (
        ("user", c_void_p), ("malloc", ADDRESS_OF_SIZE), ("free", NOTHING_OF_RANGE), ("reserve", ADDRESS_OF_SIZE),
        ("unreserve", NOTHING_OF_RANGE), ("map", TRUTH_OF_RANGE), ("unmap", NOTHING_OF_RANGE))


def device_struct(device: Device) -> CDevice:
    """A device in Python as the core calls it. It must outlive the core, and may not raise."""
    return CDevice(
        None, ADDRESS_OF_SIZE(lambda _, size: device.malloc(size) or 0),
        NOTHING_OF_RANGE(lambda _, address, size: device.free(address, size)),
        ADDRESS_OF_SIZE(lambda _, size: device.reserve(size)), NOTHING_OF_RANGE(0),
        TRUTH_OF_RANGE(lambda _, address, size: device.map(address, size)),
        NOTHING_OF_RANGE(lambda _, address, size: device.unmap(address, size)))


# Numbers in an array of 64-bit integers: of one segment, and of one block.
SEGMENT_FIELDS, BLOCK_FIELDS = 7, 4


def settings_struct(settings: Settings) -> CSettings:
    """The core's form of the settings."""
    limit, fraction = settings.max_split_size, settings.memory_fraction
    return CSettings(
        UNLIMITED if limit is None else limit, settings.max_non_split_rounding, settings.large_segment_size,
        settings.garbage_collection_threshold, -1.0 if fraction is None else fraction,
        int(settings.expandable_segments), (c_uint64 * INTERVALS)(*settings.roundup_power2_divisions))


def settings_of(told: CSettings) -> Settings:
    """The settings that the core tells."""
    limit, fraction = told.max_split_size, told.memory_fraction
    return Settings(
        None if limit == UNLIMITED else limit, told.max_non_split_rounding, tuple(told.roundup_power2_divisions),
        told.garbage_collection_threshold, bool(told.expandable_segments), told.large_segment_size,
        None if fraction < 0 else fraction)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the signatures.

    Raises:
        OSError: the library is not this ABI.
    """
    address, number, settings = POINTER(c_uint64), POINTER(c_int64), POINTER(CSettings)
    signatures = {
        "kvobs_abi": (), "kvobs_free": (c_void_p, c_uint64), "kvobs_defer": (c_void_p, c_uint64),
        "kvobs_complete": (c_void_p, c_uint64), "kvobs_record_stream": (c_void_p, c_uint64, c_int64),
        "kvobs_advance": (c_void_p, c_int64), "kvobs_empty_cache": (c_void_p,),
        "kvobs_open_pool": (c_void_p, c_int64), "kvobs_release_pool": (c_void_p, c_int64),
        "kvobs_set": (c_void_p, settings), "kvobs_get_stats": (c_void_p, POINTER(CStats)),
        "kvobs_alloc": (c_void_p, c_int64, c_int64, c_int64, address),
        "kvobs_snapshot_size": (c_void_p, number, number), "kvobs_snapshot": (c_void_p, c_void_p, c_void_p),
        "kvobs_run": (c_void_p, c_int64, *[c_void_p] * 5, settings, c_int64, *[c_void_p] * 3, number),
        "kvobs_load": (c_void_p, c_uint64, c_uint64, c_void_p, c_int64, c_void_p),
        "kvobs_finish": (c_void_p, c_uint64), "kvobs_fits": (c_void_p, c_int64, c_int64, c_int64, POINTER(c_int)),
        "kvobs_alloc_from_device": (c_void_p, c_int64, c_int64, c_int64, address),
        "kvobs_place": (c_void_p, c_uint64, c_int64, c_int64),
        "kvobs_release_for": (c_void_p, c_int64, c_int64, c_int64),
        "kvobs_settle": (c_void_p, c_uint64, c_int64, c_int64, c_int),
        "kvobs_collect": (c_void_p, POINTER(c_int)), "kvobs_empty_pool": (c_void_p, c_int64),
        "kvobs_own_allocator": (c_void_p, c_int64, c_int),
        "kvobs_install": (c_void_p, c_uint64, c_int64, c_int64, c_int64, c_int),
        "kvobs_install_pages": (c_void_p, c_uint64, c_int64, c_int64, c_int64, c_int),
        "kvobs_remove": (c_void_p, c_uint64, c_int64), "kvobs_remove_pages": (c_void_p, c_uint64, c_int64),
        "kvobs_follow": (c_void_p, c_int64, c_int64, *[c_void_p] * 9, number, number)}
    try:
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = c_int, arguments
        library.kvobs_create.restype = c_void_p
        library.kvobs_create.argtypes = (settings, c_uint64, c_void_p)
        library.kvobs_destroy.restype = None
        library.kvobs_destroy.argtypes = (c_void_p,)
    except AttributeError as error:
        raise OSError(f"the compiled core lacks a function: {error}") from None
    if library.kvobs_abi() != VERSION:
        raise OSError("the compiled core is of another version")
    return library
