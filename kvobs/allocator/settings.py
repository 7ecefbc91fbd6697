"""The settings of PyTorch's CUDA caching allocator that decide where memory goes, and the sizes that follow from them.

Source of every rule: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.*`` of PyTorch 2.0 to 2.13.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

MIB = 1 << 20
_DIGITS = 40  # of a number in PYTORCH_ALLOC_CONF
_MOST_MIB = 1 << 24  # 16 TiB; beyond it nothing changes any more, and sums of sizes must fit 64 bits
_MOST_POWER = 1 << 30
MIN_BLOCK = 512
SMALL_SIZE = MIB  # the largest request of a small pool, after rounding
SMALL_SEGMENT = 2 * MIB
MIN_LARGE_ALLOC = 10 * MIB  # from here on a request gets a segment of its own size
LARGE_SEGMENT = 20 * MIB
LEAST_LARGE = 11  # MiB: torch 2.13 takes what is more than 10
ROUND_LARGE = 2 * MIB
INTERVALS = 16  # roundup_power2_divisions: one value per power of two from 1 MiB (and below) to 32 GiB (and above)
NO_DIVISIONS = (0,) * INTERVALS
# Known to PyTorch, without influence on where device memory goes.
_ELSEWHERE = frozenset({
    "backend", "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom"})


@dataclass(frozen=True, slots=True)
class Settings:
    """One configuration. Sizes in bytes; ``None`` means without limit, or not set."""

    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = NO_DIVISIONS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    memory_fraction: float | None = None

    def round_size(self, size: int) -> int:
        """The bytes a block needs for a request of ``size`` bytes."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        divisions = self.roundup_power2_divisions[min(max(size.bit_length() - 21, 0), INTERVALS - 1)]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            return next_division(size, divisions)
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def segment_size(self, rounded: int) -> int:
        """The bytes asked of the device for a block of ``rounded`` bytes (without expandable segments)."""
        if rounded <= SMALL_SIZE:
            return SMALL_SEGMENT
        if rounded < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-rounded // ROUND_LARGE) * ROUND_LARGE

    def page_size(self, small: bool) -> int:
        """The bytes that an expandable segment maps at a time."""
        return SMALL_SEGMENT if small else self.large_segment_size

    def with_option(self, key: str, value: str) -> Settings:
        """The same settings with one option of ``PYTORCH_ALLOC_CONF`` changed.

        Raises:
            ValueError: no such option, or a value that PyTorch refuses.
        """
        if key in _ELSEWHERE:
            return self
        if key not in _OPTIONS:
            raise ValueError(f"'{key}' is no option of PYTORCH_ALLOC_CONF; known are {', '.join(sorted(_OPTIONS))}")
        name, read = _OPTIONS[key]
        try:
            changed = {name: read(value.strip())}
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        if name == "large_segment_size" and self.max_non_split_rounding == self.large_segment_size:
            changed["max_non_split_rounding"] = changed[name]  # the one's default is the other
        return replace(self, **changed)

    def conf(self) -> str:
        """The value of ``PYTORCH_ALLOC_CONF`` that gives these settings; empty for the defaults."""
        words: list[str] = []
        if self.expandable_segments:
            words.append("expandable_segments:True")
        if self.max_split_size is not None:
            words.append(f"max_split_size_mb:{self.max_split_size // MIB}")
        if self.max_non_split_rounding != self.large_segment_size:
            words.append(f"max_non_split_rounding_mb:{self.max_non_split_rounding // MIB}")
        if self.large_segment_size != LARGE_SEGMENT:
            words.append(f"large_segment_size_mb:{self.large_segment_size // MIB}")
        if len(set(self.roundup_power2_divisions)) == 1:
            if self.roundup_power2_divisions[0]:
                words.append(f"roundup_power2_divisions:{self.roundup_power2_divisions[0]}")
        else:
            pairs = ",".join(f"{1 << index}:{max(value, 1)}"  # 0 and 1 round alike; PyTorch reads only the latter
                             for index, value in enumerate(self.roundup_power2_divisions))
            words.append(f"roundup_power2_divisions:[{pairs}]")
        if self.garbage_collection_threshold:
            words.append(f"garbage_collection_threshold:{self.garbage_collection_threshold:g}")
        if self.memory_fraction is not None:
            words.append(f"per_process_memory_fraction:{self.memory_fraction:g}")
        return ",".join(words)


def parse(conf: str) -> Settings:
    """The settings that a value of ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``) gives.

    Raises:
        ValueError: an option that PyTorch does not know, or a value that it refuses.
    """
    found = Settings()
    for part in _parts(conf):
        found = _changed(found, part)
    for key, size in (("max_split_size_mb", found.max_split_size),
                      ("max_non_split_rounding_mb", found.max_non_split_rounding)):
        if size is not None and size < found.large_segment_size:
            raise ValueError(f"{key}: '{size // MIB}' is not allowed; a whole number of MiB, "
                             f"{found.large_segment_size // MIB} (the size of large segments) or more")
    return found


def known(conf: str) -> Settings:
    """The same of a PyTorch that runs, or ran: options that only it knows are passed over, as it has accepted them."""
    found = Settings()
    for part in _parts(conf):
        with suppress(ValueError):
            found = _changed(found, part)
    return found


def _parts(conf: str) -> list[str]:
    """The options, the size of large segments first: others depend on it, wherever it stands."""
    found = [part for part in re.split(r",(?![^\[]*\])", conf) if part.strip()]
    return sorted(found, key=lambda part: part.partition(":")[0].strip() != "large_segment_size_mb")


def _changed(settings: Settings, part: str) -> Settings:
    key, separator, value = part.partition(":")
    if not separator:
        raise ValueError(f"'{part.strip()}' is not of the form option:value")
    return settings.with_option(key.strip(), value)


def from_snapshot(told: dict[str, Any]) -> Settings:
    """The settings that a snapshot's ``allocator_settings`` describe; what it does not tell stays the default."""
    found = known(str(told.get("PYTORCH_CUDA_ALLOC_CONF") or told.get("PYTORCH_ALLOC_CONF") or ""))
    split = told.get("max_split_size", -1)
    divisions = told.get("roundup_power2_divisions")
    return replace(
        found,
        max_split_size=split if isinstance(split, int) and 0 < split < 1 << 62 else None,
        garbage_collection_threshold=float(told.get("garbage_collection_threshold", 0.0)),
        expandable_segments=bool(told.get("expandable_segments", False)),
        roundup_power2_divisions=tuple(int(divisions.get(str(1 << index), 0)) for index in range(INTERVALS))
        if isinstance(divisions, dict) else found.roundup_power2_divisions)


def is_option(key: str) -> bool:
    """Does PyTorch know an option of this name? It passes over others without a word."""
    return key in _OPTIONS or key in _ELSEWHERE


def next_division(size: int, divisions: int) -> int:
    """``size`` rounded up to the next of ``divisions`` equal steps between two powers of two."""
    if size & (size - 1) == 0:
        return size
    floor = 1 << (size.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    if step == 0:
        return floor << 1
    below = size & ~(step - 1)
    return below if below == size else below + step


def _megabytes(least: int) -> Any:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS) or int(text) < least:
            raise ValueError(f"'{text}' is not allowed; a whole number of MiB, {least} or more")
        return min(int(text), _MOST_MIB) * MIB
    return read


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 < value < 1.0:
        raise ValueError(f"'{text}' is not allowed; a number between 0 and 1, both excluded")
    return value


def _whole(text: str) -> float:
    return 1.0 if text in {"1", "1.0"} else _fraction(text)


def _flag(text: str) -> bool:
    if text not in {"True", "False"}:
        raise ValueError(f"'{text}' is not allowed; True or False")
    return text == "True"


def _power_of_two(text: str, what: str) -> int:
    value = int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else 0
    if not 0 < value <= _MOST_POWER or value & (value - 1):
        raise ValueError(f"'{text}' is no power of two up to {_MOST_POWER}, which {what} must be")
    return value


def _divisions(text: str) -> tuple[int, ...]:
    if not text.startswith("["):
        return (_power_of_two(text, "the divisions"),) * INTERVALS
    found, last = list(NO_DIVISIONS), -1
    for pair in text.strip("[]").split(","):
        boundary, _, value = (word.strip() for word in pair.partition(":"))
        divisions = _power_of_two(value, "the divisions")
        if boundary == ">":
            found[last + 1:] = [divisions] * (INTERVALS - last - 1)
            break
        index = min(_power_of_two(boundary, "a boundary").bit_length() - 1, INTERVALS - 1)
        if last < 0:
            found[:index] = [divisions] * index
        found[index] = divisions
        last = index
    return tuple(found)


_OPTIONS: dict[str, tuple[str, Any]] = {
    "max_split_size_mb": ("max_split_size", _megabytes(LEAST_LARGE)),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _megabytes(LEAST_LARGE)),
    "large_segment_size_mb": ("large_segment_size", _megabytes(LEAST_LARGE)),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "expandable_segments": ("expandable_segments", _flag),
    "per_process_memory_fraction": ("memory_fraction", _whole),
}
