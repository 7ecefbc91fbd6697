"""kvobs in a part's process: started as users start it, and asked through its own store.

Nothing is left out for its cost, as kvobs would do beyond 5 % of a tiny model's time: what is compared here is values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gpu._checks import Points, compared, points_read

METRICS = ("kvobs.allocator.usage", "kvobs.allocator.requested", "kvobs.allocator.active",
           "kvobs.allocator.inactive_split", "kvobs.allocator.segments", "kvobs.allocator.retries",
           "kvobs.allocator.out_of_memory", "kvobs.allocator.device.operations")


class Observed:
    """A process that kvobs observes, or (``wanted`` False) one that it leaves alone."""

    def __init__(self, store: Path, wanted: bool = True) -> None:
        self._store, self._handle = store, None
        if wanted:
            import kvobs

            self._handle = kvobs.instrument(store=str(store), prometheus="off", otlp="off",
                                            overhead_percent="100")

    def metrics(self, stats: Mapping[str, Any], device: str, conf: str) -> dict[str, Any]:
        """What kvobs stored of the allocator against torch's statistics of the same quiet moment."""
        if self._handle is None:
            return {}
        self._handle.flush()
        return {"metrics": compared(self._points(METRICS), stats, device, "expandable_segments:True" in conf),
                "availability": self._availability()}

    def held(self) -> int | None:
        """KV bytes that live caches hold, by kvobs's last samples."""
        if self._handle is None:
            return None
        self._handle.flush()
        found = self._points(("kvobs.kv.usage",))
        return sum(int(value) for (_, attributes), value in found.items() if ("state", "held") in attributes)

    def turns(self) -> dict[str, Any] | None:
        """The turns that were recorded."""
        if self._handle is None:
            return None
        self._handle.flush()
        told = [stored.record for stored in self._reader().turns()]
        return {"turns": len(told), "new_tokens": sum(turn.new_tokens for turn in told),
                "outcomes": sorted({turn.outcome for turn in told}), "devices": sorted({t.origin.device for t in told}),
                "reallocations": sum(turn.reallocations for turn in told),
                "bytes_copied": sum(turn.bytes_copied for turn in told), "hook_ns": sum(turn.hook_ns for turn in told),
                "sessions": sorted({turn.session for turn in told})}

    def flights(self) -> list[dict[str, Any]] | None:
        """The flight records: what was said, and the verdict where there is one."""
        if self._handle is None:
            return None
        self._handle.flush()
        return [_flight(stored.record) for stored in self._reader().flights()]

    def next_step(self, device: str) -> list[dict[str, Any]]:
        """What kvobs says would become of the next step now."""
        if self._handle is None:
            return []
        return [{"verdict": None if one.verdict is None else str(one.verdict), "sentence": one.sentence}
                for one in self._handle.verdict(device)]

    def close(self) -> None:
        """Stop observing."""
        if self._handle is not None:
            import kvobs

            kvobs.uninstrument()

    def _reader(self) -> Any:
        from kvobs.store import StoreReader

        return StoreReader(self._store)

    def _points(self, metrics: tuple[str, ...]) -> Points:
        reader = self._reader()
        return points_read({metric: [(point.wall_ns, point.attributes, point.value) for point in reader.points(metric)]
                            for metric in metrics})

    def _availability(self) -> dict[str, str]:
        facts = [stored.record for stored in self._reader().availability()]
        return {fact.subject: fact.reason for fact in facts if fact.subject.startswith("torch")}


def _flight(record: Any) -> dict[str, Any]:
    snapshot = json.loads(record.snapshot) if record.snapshot else {}
    verdict = snapshot.get("verdict") or {}
    return {"reason": record.reason, "device": record.device, "requested_bytes": record.requested_bytes,
            "has_snapshot": bool(record.snapshot), "has_windows": bool(record.windows),
            "totals": snapshot.get("totals"), "verdict": verdict.get("verdict"), "why_none": verdict.get("reason")}
