"""An out-of-memory error to explain, made without a GPU: ``python -m kvobs.lab.out_of_memory FILE``.

Chat sessions whose KV caches grow share a device of 2 GiB until one of them cannot have what it asks for. The requests
are those of transformers' dynamic cache, the allocator is the twin (*modelled*), and the file has torch's schema.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from kvobs.allocator.recorder import Frame, RecordingAllocator
from kvobs.allocator.settings import MIB
from kvobs.allocator.twin import OutOfMemory

CAPACITY = 2048 * MIB
LAYERS = 8
WEIGHT_BYTES = 72 * MIB  # of one layer
BYTES_PER_TOKEN = 2048  # of K, or of V, of one layer: 8 heads x 128 numbers x 2 bytes
STEP = 128  # tokens by which a cache grows at a time, so that the history stays short
SESSIONS = 8
SEED = 1
WEIGHTS: list[Frame] = [("site-packages/torch/nn/modules/module.py", 1355, "convert"), ("serve.py", 21, "load")]
CACHE: list[Frame] = [("site-packages/transformers/cache_utils.py", 119, "update"), ("serve.py", 48, "answer")]
BEGAN_US = 1_700_000_000_000_000  # of the history's clock, which ticks once per event


def run(seed: int = SEED) -> RecordingAllocator:
    """Serve sessions until memory runs out; the allocator then holds the history."""
    chance = random.Random(seed)
    allocator = RecordingAllocator(capacity=CAPACITY, now=itertools.count(BEGAN_US).__next__)
    for _ in range(LAYERS):
        allocator.alloc(WEIGHT_BYTES, frames=WEIGHTS)
    lengths: list[int] = []
    caches: list[list[int]] = []
    try:
        while True:
            if len(caches) < SESSIONS and (not caches or chance.random() < 0.5):
                lengths.append(0)
                caches.append([0] * (2 * LAYERS))
            chosen = chance.randrange(len(caches))
            if len(caches) > 2 and chance.random() < 0.12:
                for address in filter(None, caches[chosen]):
                    allocator.free(address)
                del caches[chosen], lengths[chosen]
                continue
            for _ in range(chance.choice([1, 2, 4, 8])):
                lengths[chosen] += STEP
                _grow(allocator, caches[chosen], lengths[chosen] * BYTES_PER_TOKEN)
    except OutOfMemory:
        return allocator


def _grow(allocator: RecordingAllocator, cache: list[int], size: int) -> None:
    """What ``torch.cat`` does to each K and V: a larger tensor beside the old one, then the old one goes."""
    for index, old in enumerate(cache):
        cache[index] = allocator.alloc(size, frames=CACHE)
        if old:
            allocator.free(old)


def main() -> int:
    """Write the snapshot to the path that is the one argument."""
    if len(sys.argv) != 2:
        print("Usage: python -m kvobs.lab.out_of_memory FILE", file=sys.stderr)
        return 2
    try:
        run().dump(Path(sys.argv[1]))
    except OSError as error:
        print(f"kvobs: {sys.argv[1]} cannot be written ({(error.strerror or str(error)).lower()}).", file=sys.stderr)
        return 2
    print(f"Wrote {sys.argv[1]}: an out-of-memory error made by the allocator twin, not by a GPU.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
