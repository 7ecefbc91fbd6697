"""The verdict on the next step of all live caches together. Estimated: it knows what caches will ask for, no more.

A cache that grows by concatenation asks for its new buffers and gives back the old ones as it goes. Each grows on the
stream on which its block lies now.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from kvobs.allocator.forecast import Demand, Forecast, Growth, NextStep, absent
from kvobs.allocator.live import evidence_of, state_of
from kvobs.allocator.settings import MIB, known
from kvobs.allocator.state import State
from kvobs.allocator.verdict import SUCCEEDS, Judgement, for_demands

NOT_COUNTED = "What the model itself asks for meanwhile (activations, workspaces) is not known and not counted."
EACH_ONCE = ("Every live cache is taken to grow by one token per sequence, one cache after the other, in the default "
             "pool; one that rests asks for nothing.")
NOTHING_GROWS = "No cache that grows is alive on {device}, so that nothing is asked for."


def next_step(segments: Iterable[Mapping[str, Any]], conf: str, device: str, forecast: Forecast, device_free: int,
              allowed: int | None, most_work: int) -> NextStep:
    """Judge the demand of a forecast on a device, in the state that torch's ``segments`` tell.

    Args:
        conf: the allocator's settings string in effect.
        device: a name such as ``cuda:0``.
        device_free: bytes that the device has left; ``allowed``: bytes that this process may reserve, None for all.
        most_work: requests times blocks that may be looked at, 0.2 to 0.6 us each; what is beyond is not judged.
    Raises:
        ValueError: a segment or block is not what torch lists.
    """
    growths = [growth for growth in forecast.growths if growth.demand.device == device and growth.demand.sizes]
    if not growths:
        return absent(NOTHING_GROWS.format(device=device), device, forecast.unknown)
    state = state_of(segments, int(device.rpartition(":")[2]))
    left = None if allowed is None else max(allowed - sum(segment.size for segment in state), 0)
    demands = [growth.demand._replace(stream=_stream(state, growth)) for growth in growths]
    requests, total = sum(len(demand.sizes) for demand in demands), sum(sum(demand.sizes) for demand in demands)
    judged = min(requests, most_work // max(sum(len(segment.blocks) for segment in state), 1))
    unknown = (NOT_COUNTED, EACH_ONCE, *forecast.unknown)
    asked = (f"The next step of {_count(len(growths), 'cache')} asks for {_count(requests, 'block')} and "
             f"{total / MIB:,.2f} MiB, giving the old ones back as it goes")
    if not judged:
        return NextStep(device, None, f"{asked}; there are too many blocks to judge it.", requests=requests,
                        requested_bytes=total, not_known=unknown)
    index, found = for_demands(state, known(conf), _first(demands, judged), device_free, left)
    if judged < requests and found.verdict in SUCCEEDS:
        return NextStep(device, None, f"{asked}; the first {judged} are served, the others were not judged: it would "
                        "take too long.", requests=requests, requested_bytes=total, not_known=unknown)
    return NextStep(device, found.verdict, f"{asked}; number {index + 1} decides. {found.sentence}", found.evidence,
                    index, requests, total, unknown)


def told(found: NextStep) -> dict[str, Any]:
    """For JSON, below 6 kB and the unknown."""
    whole: dict[str, Any] = {"estimated": found.estimated, "verdict": found.verdict and str(found.verdict),
                             "sentence": found.sentence, "index": found.index, "requests": found.requests,
                             "requested_bytes": found.requested_bytes, "not_known": list(found.not_known)}
    if found.verdict is not None and found.evidence is not None:
        whole["evidence"] = evidence_of(Judgement(found.verdict, found.evidence, found.sentence))
    return whole


def _stream(state: State, growth: Growth) -> int:
    """The stream of the segment in which a cache lies; what the forecast says where it lies in none."""
    at = bisect_right(state, growth.address, key=lambda segment: segment.address) - 1
    if at >= 0 and growth.address < state[at].address + state[at].size:
        return state[at].stream
    return growth.demand.stream


def _first(demands: list[Demand], number: int) -> list[Demand]:
    """The demands, ended after so many requests."""
    kept = []
    for demand in demands:
        if number > 0:
            kept.append(demand._replace(sizes=demand.sizes[:number]))
            number -= len(demand.sizes)
    return kept


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")
