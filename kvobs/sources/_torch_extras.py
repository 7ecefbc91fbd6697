"""What an accelerator's module of torch may tell beyond torch.cuda: latencies, copies, the largest free block.

Each is a function of ``torch.<kind>``, sought by its name. What is missing or fails costs its own points only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvobs.catalog import LATENCY_BOUNDS_NS
from kvobs.model import AllocationLatencies, Availability, LatencyCounts
from kvobs.sources._alloc_counts import Growth
from kvobs.sources._torch_stats import Readings

LARGEST = "torch: largest free block"
LATENCY = "torch: allocation latency"
COPIES = "torch: device copies"
ONLY_SNAPSHOT = "Only a snapshot of the allocator tells it, which is too expensive to take once a second."
UNTIMED = "torch.{kind} does not tell how long its allocations took."
UNCOUNTED = "torch.{kind} does not count its copies between devices."
MODELLED = "The time that calls for device memory take is modelled ({profile} profile)."
FAILED = "torch.{kind}.{function} failed ({error})."
_SILENT = {"largest_free": (LARGEST, ONLY_SNAPSHOT), "allocation_latencies": (LATENCY, UNTIMED),
           "copies": (COPIES, UNCOUNTED)}


class Extras:
    """The optional functions of one kind of accelerator."""

    def __init__(self, kind: str, module: Any) -> None:
        self.kind, self._module = kind, module
        self._errors: dict[str, str] = {}
        self._growths: dict[int, Growth] = {}
        self._inherited: dict[tuple[str, str], tuple[int, int]] = {}  # copies that the parent of a fork has told

    def largest_free(self, index: int) -> int | None:
        """Bytes of the largest free block of any stream and pool of a device."""
        found = self._ask("largest_free", index)
        return None if found is None else int(found)

    def latencies(self, now_ns: int, index: int) -> tuple[AllocationLatencies | None, Readings]:
        """The allocations of a device that were timed since the last call, and the counts of its calls.

        The function answers with the fields of ``LatencyCounts``: a named tuple, a mapping, or attributes.
        """
        counts = self._counts(index)
        if counts is None:
            return None, ()
        growth = self._growths.setdefault(index, Growth(self._name(index)))
        try:
            return growth.take(now_ns, counts)
        except ValueError as error:  # as many buckets as it had before
            self._errors["allocation_latencies"] = type(error).__name__
            return None, ()

    def after_fork_in_child(self) -> None:
        """What the parent counted is the parent's; what is alive is alive here too."""
        for index in self._growths:
            self._growths[index] = Growth(self._name(index), self._counts(index))
        self._inherited = self._ask("copies") or {}

    def copies(self) -> Readings:
        """What was copied from device to device, since the accelerator began to count."""
        readings: Readings = ()
        for pair, (count, size) in (self._ask("copies") or {}).items():
            before, before_bytes = self._inherited.get(pair, (0, 0))
            way = str(pair[0]), str(pair[1])
            readings += (("kvobs.device.copy.operations", way, float(count - before)),
                         ("kvobs.device.copy.io", way, float(size - before_bytes)))
        return readings

    def profile(self) -> Readings:
        """The profile after which device calls take their time, as a setting; nothing where they take their own."""
        name = self._ask("latency_profile")
        return (("kvobs.allocator.setting", ("device_latency", f"modelled: {name} profile"), 1.0),) if name else ()

    def facts(self) -> list[Availability]:
        """Which of it is told, and why the rest is not."""
        return [self._fact(function) for function in _SILENT]

    def _fact(self, function: str) -> Availability:
        subject, silent = _SILENT[function]
        if not hasattr(self._module, function):
            return Availability(subject, False, silent.format(kind=self.kind))
        if error := self._errors.get(function):
            return Availability(subject, False, FAILED.format(kind=self.kind, function=function, error=error))
        name = self._ask("latency_profile") if subject == LATENCY else None
        return Availability(subject, True, MODELLED.format(profile=name) if name else "")

    def _counts(self, index: int) -> LatencyCounts | None:
        found = self._ask("allocation_latencies", index, LATENCY_BOUNDS_NS)
        if found is None:
            return None
        try:
            fields = found._asdict() if hasattr(found, "_asdict") else found
            return msgspec.convert(fields, LatencyCounts, from_attributes=True)
        except (msgspec.ValidationError, ValueError) as error:  # another shape
            self._errors["allocation_latencies"] = type(error).__name__
            return None

    def _name(self, index: int) -> str:
        return f"{self.kind}:{index}"

    def _ask(self, function: str, *arguments: object) -> Any:
        """What the function answers; None where it is missing or fails."""
        call = getattr(self._module, function, None)
        try:
            found = call(*arguments) if call is not None else None
        except Exception as error:
            self._errors[function] = type(error).__name__
            return None
        self._errors.pop(function, None)
        return found
