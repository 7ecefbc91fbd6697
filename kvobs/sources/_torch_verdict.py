"""The verdict on the next step of the live caches, asked for by somebody: one snapshot of torch's allocator.

Never polled: a snapshot takes the lock that every allocation of the engine waits for. Devices that this process has
not used are not touched, and nothing is read while a CUDA graph is being captured.
"""

from __future__ import annotations

from collections.abc import Callable

from kvobs.allocator.forecast import Forecast, NextStep, absent
from kvobs.allocator.next_step import NOTHING_GROWS, next_step
from kvobs.sources._torch_handle import Torch
from kvobs.sources._torch_stats import blocks, touched

MOST_BLOCKS = 50_000  # of all devices; torch's own time to list them is what the engine waits for
MOST_WORK = 5_000_000  # requests times blocks: seconds
HISTORY = "No verdict: the host records a memory history, whose stacks a snapshot would resolve."
CROWDED = f"No verdict: there are more than {MOST_BLOCKS:,} blocks, and a snapshot of them would hold up the engine."
CAPTURING = "No verdict: a CUDA graph is being captured."
UNLISTED = "No verdict: {why}."
UNUSED = "This process has not used a device of {kind} yet."
NOT_THERE = "No allocator of a device called {device} is in use in this process; there is: {known}."
FAILED = "No verdict: it could not be told ({error})."


def verdicts(torch: Torch, kind: str, capturing: Callable[[], bool], forecast: Forecast,
             device: str | None = None) -> list[NextStep]:
    """A verdict per device of ``kind`` that this process uses, or of the one called ``device``; never empty.

    torch's exceptions pass through.
    """
    if unlisted := torch.unlisted(kind):
        return [absent(UNLISTED.format(why=unlisted), device or "")]
    stats = [torch.stats(index) for index in range(torch.device_count())]
    used = {f"{kind}:{index}": index for index, found in enumerate(stats) if touched(found)}
    if not used:
        return [absent(UNUSED.format(kind=kind), device or "")]
    if device is not None and device not in used:
        return [absent(NOT_THERE.format(device=device, known=", ".join(used)), device)]
    names = list(used) if device is None else [device]
    growing = {growth.demand.device for growth in forecast.growths}
    if growing.isdisjoint(names):
        return [absent(NOTHING_GROWS.format(device=name), name, forecast.unknown) for name in names]
    why = (CAPTURING if capturing() else HISTORY if torch.resolves_stacks(kind) else
           CROWDED if sum(map(blocks, stats)) > MOST_BLOCKS else "")
    if why:
        return [absent(why, name, forecast.unknown) for name in names]
    segments, (conf, _) = torch.segments(kind), torch.settings()
    return [next_step(segments, conf, name, forecast, *torch.free_bytes(kind, used[name]), MOST_WORK) for name in names]
