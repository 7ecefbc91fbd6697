"""Scenes with source torch on the real virtual GPU, run one after the other in a process of their own.

Prints, as JSON, what each scene saw, or how it failed. The first one registers the accelerator, which torch cannot take
back; each of the others begins with two empty devices of 64 MiB.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from kvobs import model
from kvobs.allocator.forecast import Forecast
from kvobs.bus import Bus
from kvobs.sources._torch import TorchSource
from kvobs.sources.transformers._demand import forecast
from kvobs.virtual import latency_profiles, setup
from tests.fake_torch import FakeTorch

MIB = 1 << 20
SIZES = ["64MiB", "64MiB"]
virtual: Any = None  # torch.vgpu, once it is there


class Watch:
    """An installed source and what it has emitted and said."""

    def __init__(self, tell: Callable[[], Forecast] = Forecast) -> None:
        self.events: list[model.Event] = []
        self.source = TorchSource(Bus(64))
        self.source.foresee(tell)
        self.source.install(self.events.append)

    def records(self) -> list[model.FlightRecord]:
        return [event for event in self.events if isinstance(event, model.FlightRecord)]

    def sample(self) -> list[model.Event]:
        return list(self.source.sample(1))

    def facts(self) -> dict[str, tuple[bool, str]]:
        return {fact.subject: (fact.available, fact.reason) for fact in self.source.availability()}


@contextmanager
def watching(tell: Callable[[], Forecast] = Forecast) -> Iterator[Watch]:
    watch = Watch(tell)
    try:
        yield watch
    finally:
        watch.source.uninstall()


def mebibytes(number: int, device: str = "vgpu:0") -> torch.Tensor:
    return torch.empty(number * MIB, dtype=torch.uint8, device=device)


def fails(number: int, device: str = "vgpu:0") -> bool:
    try:
        mebibytes(number, device)
    except torch.OutOfMemoryError:
        return True
    return False


def counted(events: list[model.Event], name: str) -> dict[str, float]:
    return {"|".join(attributes): value for event in events if isinstance(event, model.Poll)
            for found, attributes, value in event.readings if found == name}


def timed(events: list[model.Event]) -> list[model.AllocationLatencies]:
    return [event for event in events if isinstance(event, model.AllocationLatencies)]


def verdict(record: model.FlightRecord) -> Any:
    return json.loads(record.snapshot)["verdict"]


def kvobs_first() -> Any:
    global virtual
    with watching() as watch:
        before = watch.facts()["torch"]
        setup(SIZES)
        virtual = torch.vgpu  # type: ignore[attr-defined]
        watch.sample()
        return before[0], fails(100, "vgpu:1"), [record.device for record in watch.records()]


def setup_first() -> Any:
    with watching() as watch:
        kept = mebibytes(40, "vgpu:1")
        assert fails(30, "vgpu:1")
        record, = watch.records()
        reserved = torch.accelerator.memory_stats(1)["reserved_bytes.all.current"]
        held = json.loads(record.snapshot)["totals"]["reserved"]
        told = verdict(record)
        return (record.device, record.requested_bytes, told["verdict"], told["request"], held == reserved,
                kept.numel() == 40 * MIB)


def names() -> Any:
    return [name for name in vars(FakeTorch(kind="vgpu").vgpu) if not hasattr(virtual, name)]


def available() -> Any:
    with watching() as watch:
        kept = mebibytes(1)
        watch.sample()
        return watch.facts(), kept.numel()


def states() -> Any:
    with watching() as watch:
        kept = [mebibytes(12, "vgpu:1"), *(mebibytes(size) for size in (16, 7, 3, 5, 4))]
        del kept[2], kept[3]
        told = [(event.device, event.reserved_bytes, event.allocated_bytes, event.largest_free_bytes)
                for event in watch.sample() if isinstance(event, model.AllocatorState)]
        expected = []
        for index in range(2):
            stats = torch.accelerator.memory_stats(index)
            free = [block["size"] for segment in virtual.memory_snapshot() if segment["device"] == index
                    for block in segment["blocks"] if block["state"] == "inactive"]
            expected.append((f"vgpu:{index}", stats["reserved_bytes.all.current"],
                             stats["allocated_bytes.all.current"], max(free, default=0)))
        return told, expected


def fragmentation() -> Any:
    with watching() as watch:
        pins = [mebibytes(6) for _ in range(9)][::3]
        assert fails(20)
        return verdict(watch.records()[0])["verdict"], len(pins)


def attached() -> Any:
    called: list[Any] = []

    def host(*told: int) -> None:
        called.append(told)

    virtual.attach_out_of_memory_observer(host)
    with watching() as watch:
        assert fails(100)
    assert fails(100)
    virtual.detach_out_of_memory_observer(host)
    assert fails(100)
    with watching() as again:
        assert fails(100)
    return len(watch.records()), len(again.records()), len(called), called[0][:2], mebibytes(1).numel()


def streams() -> Any:
    with watching() as watch:
        kept, stream = [mebibytes(40)], torch.Stream("vgpu:0")
        with stream:
            kept.append(mebibytes(12))
            assert fails(30)
        number = verdict(watch.records()[0])["request"]["stream"]
        return (number == stream.stream_id != 0,
                sorted({segment["stream"] for segment in virtual.memory_snapshot()}) == [0, number])


def latencies() -> Any:
    with watching() as watch:
        kept = [mebibytes(1)]
        began = watch.sample()
        kept += [mebibytes(2) for _ in range(7)]
        polled = [watch.sample(), watch.sample()]
        del kept[4:]
        ended = watch.sample()
        new = [sum(event.counts) for events in polled for event in timed(events) if event.device == "vgpu:0"]
        event, = (event for event in timed(polled[0]) if event.device == "vgpu:0")
        growth = {name: [counted(ended, name)[f"vgpu:0|{what}"] - counted(began, name)[f"vgpu:0|{what}"]
                         for what in ("allocate", "free")] for name in ("kvobs.alloc.operations", "kvobs.alloc.io")}
        return new, len(event.counts), event.sum_ns > 0, growth


def modelled() -> Any:
    profile = latency_profiles()["A100"]
    setup(SIZES, latency="A100")
    try:
        with watching() as watch:
            watch.sample()
            kept = [mebibytes(20) for _ in range(3)]
            seen = watch.sample()
            setting = counted(seen, "kvobs.allocator.setting")
            return (setting.get("device_latency|modelled: A100 profile"), watch.facts()["torch: allocation latency"],
                    sum(event.sum_ns for event in timed(seen)) >= len(kept) * (profile.alloc_ns or 0))
    finally:
        setup(SIZES)


def copies() -> Any:
    with watching() as watch:
        host, kept = torch.zeros(MIB, dtype=torch.uint8), mebibytes(1)
        before = watch.sample()
        there = [host.to("vgpu:0") for _ in range(3)]
        across = [tensor.to("vgpu:1") for tensor in there[:2]]
        back = across[0].cpu()
        after = watch.sample()

        def growth(name: str) -> dict[str, float]:
            old = counted(before, name)
            grown = {pair: value - old.get(pair, 0) for pair, value in counted(after, name).items()}
            return {pair: value for pair, value in grown.items() if value}

        return (growth("kvobs.device.copy.operations"), growth("kvobs.device.copy.io"),
                torch.equal(back, host), kept.numel())


def next_step(size: int) -> Any:
    """The verdict on one more token of a cache with K and V of ``size`` MiB, and what that token then does."""
    cache = DynamicCache()
    with watching(lambda: forecast([cache])) as watch:
        row = torch.zeros(1, 1, 1, size * MIB // 400, device="vgpu:0")
        cache.update(row.expand(1, 1, 100, -1), row.expand(1, 1, 100, -1), 0)
        told, = watch.source.verdict("vgpu:0")
        before, ended = torch.accelerator.memory_stats(0), "served"
        try:
            cache.update(row, row, 0)
        except torch.OutOfMemoryError:
            ended = "out of memory"
        after = torch.accelerator.memory_stats(0)
        return (str(told.verdict), told.index, ended, after["num_device_alloc"] - before["num_device_alloc"],
                after["num_alloc_retries"] - before["num_alloc_retries"])


def history() -> Any:
    virtual.memory._record_memory_history(max_entries=100)
    try:
        return next_step(12)[0]
    finally:
        virtual.memory._record_memory_history(enabled=None)


def allocated(watch: Watch) -> int:
    return sum(event.allocated_bytes for event in watch.sample() if isinstance(event, model.AllocatorState))


def forked() -> Any:
    with watching() as watch:
        kept = [mebibytes(3)]
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                watch.source.after_fork_in_child()
                kept.append(mebibytes(5))
                saw = allocated(watch)
                assert fails(100)
                os.write(writing, json.dumps([saw, [record.device for record in watch.records()]]).encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with os.fdopen(reading) as said:
            return json.loads(said.read()), allocated(watch)


SCENES: dict[str, Callable[[], Any]] = {
    "kvobs first": kvobs_first, "setup first": setup_first, "names": names, "available": available, "states": states,
    "fragmentation": fragmentation, "attached": attached, "streams": streams, "latencies": latencies,
    "modelled": modelled, "copies": copies, "12 MiB": lambda: next_step(12), "18 MiB": lambda: next_step(18),
    "26 MiB": lambda: next_step(26), "history": history,
    "forked": forked,
}


def main() -> None:
    """Run all scenes."""
    seen: dict[str, Any] = {}
    for name, scene in SCENES.items():
        try:
            seen[name] = scene()
        except Exception:
            seen[name] = {"failed": traceback.format_exc()}
        gc.collect()
        torch.accelerator.empty_cache()
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
