"""The verdict inside the process itself, of the segments that ``torch.cuda.memory_snapshot`` lists."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kvobs.allocator.readers._pools import Pools
from kvobs.allocator.readers._segments import states
from kvobs.allocator.settings import MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_SEGMENT, SMALL_SIZE, Settings, known
from kvobs.allocator.state import State
from kvobs.allocator.verdict import Judgement, Request, judge


def state_of(segments: Iterable[Mapping[str, Any]], device: int) -> State:
    """One device's state, without stacks. About 1 us per block.

    Raises:
        ValueError: a segment or block is not what torch lists.
    """
    return states([dict(segment) for segment in segments if segment.get("device", 0) == device],
                  None, Pools()).get(device, ())


def requests_of(segment_bytes: int, settings: Settings) -> tuple[int, int]:
    """The least and the most bytes of a request for which a segment of ``segment_bytes`` is asked of the device.

    That is all that PyTorch tells of a request that failed: the size it asked of the device, not the one it was asked.
    """
    if segment_bytes == SMALL_SEGMENT:
        below, most = 0, SMALL_SIZE
    elif segment_bytes == settings.large_segment_size:
        below, most = SMALL_SIZE, segment_bytes
    else:
        below, most = max(segment_bytes - ROUND_LARGE, MIN_LARGE_ALLOC - 1), segment_bytes
    sizes = range(1, most + 1)  # what they are rounded to grows with them
    last = bisect_right(sizes, most, key=settings.round_size)
    return min(bisect_right(sizes, below, key=settings.round_size) + 1, last), last


def retry(segments: Iterable[Mapping[str, Any]], conf: str, device: int, stream: int, asked_bytes: int,
          allowed: int, device_free: int, *, exact: bool = False) -> dict[str, Any]:
    """What would become of a request that has just failed, if it was made again now.

    The allocator has waited for the device and released its cache before it failed, so SERVED means that it failed
    although what it waited for is enough. ``asked_bytes`` is the segment that was asked of the device, which is all
    that CUDA's allocator tells, or with ``exact`` the request itself. ``conf`` is the settings string in effect,
    ``allowed`` the bytes that the process may reserve. The result is for JSON, below 8 kB. Its ``verdict`` is None
    where the least and the most that may have been requested lead to different ones, which it then gives as
    ``between``.

    Raises:
        ValueError: a segment is not what torch lists.
    """
    settings = known(conf)
    state = state_of(segments, device)
    left = max(allowed - sum(segment.size for segment in state), 0)
    least, most = (asked_bytes, asked_bytes) if exact else requests_of(asked_bytes, settings)
    small, large = (judge(state, settings, Request(size, stream), device_free, left) for size in (least, most))
    told: dict[str, Any] = {"verdict": str(large.verdict) if large.verdict is small.verdict else None,
                            "request": {"least_bytes": least, "most_bytes": most, "stream": stream, "pool": 0}}
    if told["verdict"] is None:
        told["between"] = [str(small.verdict), str(large.verdict)]
    return told | {"sentence": large.sentence, "evidence": evidence_of(large)}


def evidence_of(judgement: Judgement) -> dict[str, Any]:
    """The evidence for JSON."""
    found = asdict(judgement.evidence)
    found["elsewhere"] = judgement.evidence.elsewhere._asdict() if judgement.evidence.elsewhere else None
    found["pins"] = [pin._asdict() | {"block": pin.block._asdict()} for pin in judgement.evidence.pins]
    return found
