"""The flight recorder: the last minute of what matters, kept so that it can be told when memory runs out.

Pure and bounded: the runtime hands in the points of each second and gets records back.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from kvobs.catalog import Row
from kvobs.model import Event, FlightRecord, OutOfMemory

SECONDS = 60
LIMIT_CHARACTERS = 60_000
_SERIES = 200
SECOND_NS, PER_MINUTE = 1_000_000_000, 10
METRICS = frozenset({
    "kvobs.kv.usage", "kvobs.kv.caches", "kvobs.kv.blocks", "kvobs.kv.reallocations", "kvobs.kv.copied",
    "kvobs.kv.block.failures", "kvobs.kv.preemptions", "kvobs.kv.fragmentation.article", "kvobs.out_of_memory",
    "kvobs.allocator.usage", "kvobs.allocator.active", "kvobs.allocator.inactive_split", "kvobs.allocator.retries",
    "kvobs.window.fragmentation", "kvobs.window.largest_free", "kvobs.window.allocation.variance",
    "kvobs.window.step.mean", "kvobs.window.step.variance", "kvobs.heap.usage", "kvobs.device.memory",
    "process.memory.usage", "kvobs.host.cgroup.memory", "kvobs.attention.reclaimable",
})


class Ration:
    """At most one per second, and ``per_minute`` in any minute."""

    def __init__(self, per_minute: int) -> None:
        self._taken: deque[int] = deque(maxlen=per_minute)

    def take(self, now_ns: int) -> bool:
        """Whether one may be taken at ``now_ns``; it counts as taken then."""
        taken = self._taken
        if taken and now_ns - taken[-1] < SECOND_NS:
            return False
        if len(taken) == taken.maxlen and now_ns - taken[0] < 60 * SECOND_NS:
            return False
        taken.append(now_ns)
        return True


class FlightRecorder:
    """The last ``SECONDS`` samples of ``METRICS``, and the out-of-memory errors that were recorded."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, dict[str, float]]] = deque(maxlen=SECONDS)
        self._ration = Ration(PER_MINUTE)

    def note(self, now_ns: int, families: Iterable[tuple[Row, Mapping[tuple[str, ...], object]]]) -> None:
        """Keep a second's points."""
        sample: dict[str, float] = {}
        for row, points in families:
            if row.name in METRICS:
                for attributes, value in points.items():
                    if isinstance(value, int | float) and len(sample) < _SERIES:
                        sample[_series(row, attributes)] = value
        self._samples.append((now_ns, sample))

    def complete(self, events: Iterable[Event]) -> list[Event]:
        """The events with the last minute in each flight record, and a record for each other out-of-memory error.

        At most one record per second and ten per minute are taken; the errors themselves are all told.
        """
        told: list[Event] = []
        for event in events:
            if isinstance(event, FlightRecord):
                if self._ration.take(event.t_ns):
                    told.append(msgspec.structs.replace(event, windows=self.windows(event.t_ns)))
                continue
            told.append(event)
            if isinstance(event, OutOfMemory) and self._ration.take(event.t_ns):
                device = event.origin.device if event.origin else "unknown"
                told.append(FlightRecord(event.t_ns, "out_of_memory", device, None, event.message,
                                         self.windows(event.t_ns), ""))
        return told

    def windows(self, now_ns: int) -> str:
        """JSON: ``age_s`` of each sample, oldest first, and per series its values (null where it had none)."""
        samples = [found for found in self._samples if now_ns - found[0] <= SECONDS * SECOND_NS]
        while samples:
            names = sorted({name for _, sample in samples for name in sample})
            text = json.dumps({
                "age_s": [round((now_ns - t_ns) / 1e9, 3) for t_ns, _ in samples],
                "series": {name: [sample.get(name) for _, sample in samples] for name in names}},
                separators=(",", ":"))
            if len(text) <= LIMIT_CHARACTERS:
                return text
            samples = samples[len(samples) // 2 + 1:]  # the newest say most
        return '{"age_s":[],"series":{}}'


def _series(row: Row, attributes: tuple[str, ...]) -> str:
    pairs = ",".join(f"{key}={value}" for key, value in zip(row.attributes, attributes, strict=True))
    return f"{row.name}{{{pairs}}}" if pairs else row.name
