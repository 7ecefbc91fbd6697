"""Several streams: blocks of each, blocks used by others, and blocks freed while another stream is still at work.

At the end a private pool that needs no graph.
"""

from __future__ import annotations

from typing import Any

from tests.gpu._checks import check

STREAMS, ROUNDS = 3, 12
KIB, MIB = 1 << 10, 1 << 20
SIZES = (700, 40 * KIB, 900 * KIB, MIB + 1, 5 * MIB, 12 * MIB, 33 * MIB)
BUSY_MS = 30


def interleave(device: Any) -> dict[str, Any]:
    """Allocate on each stream, use on the next, free at once; some blocks live on."""
    torch = device.torch
    streams = [device.stream() for _ in range(STREAMS)]
    kept: list[Any] = []
    waited = 0
    for round_ in range(ROUNDS):
        for index, stream in enumerate(streams):
            size = SIZES[(round_ * STREAMS + index) % len(SIZES)]
            with device.on(stream):
                block = torch.empty(size, dtype=torch.uint8, device=device.device)
                block.fill_(round_)
            other = streams[(index + 1) % STREAMS]
            with device.on(other):
                device.occupy(BUSY_MS)
                block.record_stream(other)
            if (round_ + index) % 4 == 0:
                kept.append(block)
            del block
            stats = device.stats()
            waited = max(waited, stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"])
        if round_ % 5 == 4:
            device.settle()
            kept = kept[::2]
        if round_ == ROUNDS // 2:
            device.module.empty_cache()
    device.settle()
    again = torch.empty(KIB, dtype=torch.uint8, device=device.device)  # an allocation takes in what has completed
    stats = device.stats()
    kept += [again, streams]
    return {"streams": STREAMS, "rounds": ROUNDS, "most_pending_bytes": waited, "keep": kept,
            **_in_a_pool(device, kept),
            "checks": [check("blocks were pending while another stream was at work", True, waited > 0),
                       check("nothing is pending once the device is idle", stats["allocated_bytes.all.current"],
                             stats["active_bytes.all.current"])]}


def _in_a_pool(device: Any, kept: list[Any]) -> dict[str, Any]:
    """Allocations in a MemPool, where this torch has it; a failure here costs only this."""
    try:
        pool = device.module.MemPool()
        with device.module.use_mem_pool(pool):
            kept.append(device.torch.empty(5 * MIB, dtype=device.torch.uint8, device=device.device))
        kept.append(pool)
        return {"mem_pool": "used"}
    except Exception as error:
        return {"mem_pool": f"{type(error).__name__}: {error}"[:200]}
