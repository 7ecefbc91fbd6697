"""Pure definitions: each formula once, under its owner's name."""

from __future__ import annotations


def article_fragmentation_rate(total_bytes: int, largest_bytes: int) -> float | None:
    """The reference article's (total allocated - largest contiguous block) / total allocated, unitless.

    Absent when nothing is allocated. It is reported because the article defines it; it does not measure
    fragmentation (many equal buffers alone drive it to 1), so nothing in kvobs decides on it but the action
    ``gc_threshold`` and the preset ``article``, as the article has it.
    """
    return (total_bytes - largest_bytes) / total_bytes if total_bytes > 0 else None


def write_amplification(bytes_written: int, bytes_copied: int) -> float | None:
    """(written + copied) / written, unitless, at least 1: how often each new KV byte was moved. Absent if none."""
    return (bytes_written + bytes_copied) / bytes_written if bytes_written > 0 else None


def unused_share(reserved_bytes: int, allocated_bytes: int) -> float | None:
    """(reserved - allocated) / reserved: the share of an allocator's device memory that serves nobody now."""
    return (reserved_bytes - allocated_bytes) / reserved_bytes if reserved_bytes > 0 else None


def chance_share(length: int, window: int, sinks: int = 0) -> float | None:
    """Mean share of the keys in view that lie at most ``window`` tokens before their query, unitless.

    It is the locality (S7) of uniform causal attention over ``length`` tokens: 0.388 at 512 and 64. The first ``sinks``
    keys count for nothing, and queries that see no other key are left out. Absent when none is left.
    """
    seen = range(1, length - sinks + 1)
    return sum(min(keys, window + 1) / keys for keys in seen) / len(seen) if seen else None


def corrected(share: float, chance: float) -> float | None:
    """(share - chance) / (1 - chance): 0 where attention is uniform, 1 where all of it is near.

    The form of Cohen's kappa. Absent where chance leaves no room, that is, every key in view is near.
    """
    return (share - chance) / (1 - chance) if chance < 1 else None
