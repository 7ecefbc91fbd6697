"""Memory maps of source torch, on a device whose allocator is the twin: when they are taken and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs import model, runtime
from kvobs.allocator.memory_map import MOST_BLOCKS, sums, unpack
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED
from kvobs.config import Config
from kvobs.sources import _torch_listen as listen
from kvobs.sources import _torch_map as maps
from kvobs.sources._torch import TorchSource
from kvobs.store import StoreReader, touch, watched
from tests.fake_torch import stat, stats
from tests.mapped import Mapped, source_on

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def _no_trampolines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_attached", [])
    monkeypatch.setattr(listen, "_listening", {})


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that passes in a test decides nothing, unless the test says what a map costs."""
    monkeypatch.setattr("time.thread_time_ns", lambda: 0)


@pytest.fixture
def sources() -> Iterator[list[TorchSource]]:
    made: list[TorchSource] = []
    yield made
    for one in made:
        one.uninstall()


def fragmented(settings: Settings | None = None) -> Mapped:
    """Weights, two caches, free gaps, and a block that another stream still uses."""
    fake = Mapped(1024 * MIB, settings)
    fake.weights = [fake.twin.alloc(size) for size in (56 * MIB, 3 * MIB + 1000, 300_000, 2304)]
    fake.caches = {"anna": fake.cache(3, 40, 64 * 1024), "ben": fake.cache(2, 300, 4 * 1024)}
    gone = fake.cache(4, 50, 64 * 1024)
    pending = fake.twin.alloc(2 * MIB)
    fake.twin.record_stream(pending, 7)
    for layer in gone.layers:
        fake.twin.free(layer.keys.address)
    fake.twin.free(pending)
    return fake


def taken(source: TorchSource, now_ns: int = SECOND) -> list[model.MemoryMap]:
    return [event for event in source.sample(now_ns) if isinstance(event, model.MemoryMap)]


def fact(source: TorchSource) -> model.Availability | None:
    return next((one for one in source.availability() if one.subject == maps.SUBJECT), None)


@pytest.mark.parametrize("expandable", [False, True])
def test_the_sums_of_a_map_are_the_allocators(sources: list[TorchSource], expandable: bool) -> None:
    """Reserved, allocated, active and requested bytes of the map equal the twin's own counters, as the events say."""
    fake = fragmented(Settings(expandable_segments=expandable))
    sources.append(source_on(fake, lambda: True))
    (found,) = taken(sources[0])
    total, counted = sums(unpack(found.packed)), fake.twin.stats()
    assert (total.reserved, total.allocated, total.active, total.requested) == (
        counted.reserved, counted.allocated, counted.active, counted.requested)
    assert total.pending == 2 * MIB
    assert total.reserved == total.allocated + total.pending + total.free
    assert (found.reserved_bytes, found.allocated_bytes, found.active_bytes, found.requested_bytes) == (
        counted.reserved, counted.allocated, counted.active, counted.requested)
    assert found.steady


def test_blocks_have_their_holders(sources: list[TorchSource]) -> None:
    """Every block at a cache's or a weight's address is its; no other block has a holder."""
    fake = fragmented()
    sources.append(source_on(fake, lambda: True))
    (found,) = taken(sources[0])
    owner = {one.address: one.holder for one in fake.held()}
    said = {block.address: found.holders[block.stack] if block.stack >= 0 else None
            for segment in unpack(found.packed) for block in segment.blocks if block.state == ALLOCATED}
    assert said == {address: owner.get(address) for address in said}
    assert owner.keys() <= said.keys()
    assert None in said.values()


def test_nothing_is_taken_while_nobody_looks(sources: list[TorchSource]) -> None:
    """Without a view no snapshot is taken and nothing is said of maps; with one there is one per poll."""
    fake, looks = fragmented(), [False]
    sources.append(source_on(fake, lambda: looks[0]))
    assert taken(sources[0]) == []
    assert (fake.snapshots, fact(sources[0])) == (0, None)
    looks[0] = True
    assert len(taken(sources[0], 2 * SECOND)) == len(taken(sources[0], 3 * SECOND)) == 1
    assert (fake.snapshots, fact(sources[0])) == (2, model.Availability(maps.SUBJECT, True, ""))
    looks[0] = False
    assert (taken(sources[0], 4 * SECOND), fake.snapshots) == ([], 2)


def test_costly_maps_are_rare(sources: list[TorchSource], monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of 60 ms at a share of 2 % is followed by none for three seconds, and says so."""
    now = [0]

    def clock() -> int:
        now[0] += 20_000_000
        return now[0]

    monkeypatch.setattr("time.thread_time_ns", clock)
    fake = fragmented()
    sources.append(source_on(fake, lambda: True))
    (found,) = taken(sources[0], 10 * SECOND)
    assert (found.duration_ns, found.every_ns) == (20_000_000, SECOND)
    assert [len(taken(sources[0], 10 * SECOND + after)) for after in (SECOND, 2 * SECOND - 1, 2 * SECOND)] == [0, 0, 1]
    assert fact(sources[0]) == model.Availability(maps.SUBJECT, True, "")


def busy(fake: Mapped, snapshots: int) -> None:
    """The engine allocates right after each of the first snapshots."""
    listed = fake.cuda.memory.memory_snapshot

    def snapshot(mempool_id: object = None, include_traces: bool = True) -> list[Any]:
        found: list[Any] = listed(mempool_id, include_traces)
        if fake.snapshots <= snapshots:
            fake.twin.alloc(1 * MIB)
        return found

    fake.cuda.memory.memory_snapshot = snapshot


def test_a_map_of_no_one_moment_says_so(sources: list[TorchSource]) -> None:
    """Where the engine allocates during every try, three are made, and the map is told as not of one moment."""
    fake = fragmented()
    busy(fake, 99)
    sources.append(source_on(fake, lambda: True))
    (found,) = taken(sources[0])
    assert (found.steady, fake.snapshots) == (False, 3)


def test_a_second_try_is_of_one_moment(sources: list[TorchSource]) -> None:
    """Where the engine allocates during the first try only, the second one's map is that of the statistics."""
    fake = fragmented()
    busy(fake, 1)
    sources.append(source_on(fake, lambda: True))
    (found,) = taken(sources[0])
    assert (found.steady, fake.snapshots) == (True, 2)
    assert sums(unpack(found.packed)).allocated == found.allocated_bytes == fake.twin.stats().allocated


def test_a_holder_that_moves_meanwhile_is_not_guessed(sources: list[TorchSource]) -> None:
    """A cache that grows between two looks has no block there; what stayed where it was has its holder."""
    fake, looks = fragmented(), [0]

    def held() -> Any:
        looks[0] += 1
        if looks[0] == 2:
            fake.grow("anna")
        return fake.held()

    sources.append(source_on(fake, lambda: True, held))
    (found,) = taken(sources[0])
    assert {name for _, name, _ in found.holders} == {"ben", "tiny"}


def _crowd(fake: Mapped) -> None:
    fake._C._accelerator_getDeviceStats = lambda index: stats(active=stat(MOST_BLOCKS + 1))


def _unused(fake: Mapped) -> None:
    zero = {name: stat(0) for name in ("reserved_bytes", "allocated_bytes", "active", "inactive_split", "segment")}
    fake._C._accelerator_getDeviceStats = lambda index: stats(**zero)


def _broken(fake: Mapped) -> None:
    def snapshot(mempool_id: object = None, include_traces: bool = True) -> list[Any]:
        raise RuntimeError("no")

    fake.cuda.memory.memory_snapshot = snapshot


@pytest.mark.parametrize(("change", "reason"), [
    (_crowd, maps.CROWDED), (_unused, maps.UNUSED), (lambda fake: setattr(fake, "history", True), maps.HISTORY),
    (_broken, maps.FAILED.format(error="RuntimeError"))], ids=["crowded", "unused", "history", "broken"])
def test_what_stands_in_the_way_is_said_in_a_sentence(sources: list[TorchSource], change: Any, reason: str) -> None:
    """No map is made, the reason is one whole sentence, and the poll's other figures are told all the same."""
    fake = fragmented()
    change(fake)
    sources.append(source_on(fake, lambda: True))
    events = list(sources[0].sample(SECOND))
    assert not [event for event in events if isinstance(event, model.MemoryMap)]
    assert [event for event in events if isinstance(event, model.Poll)]
    assert fact(sources[0]) == model.Availability(maps.SUBJECT, False, reason)
    assert fake.snapshots == 0


def test_nothing_is_taken_while_a_graph_is_captured(sources: list[TorchSource]) -> None:
    """Between the beginning and the end of a capture no snapshot is taken."""
    fake = fragmented()
    sources.append(source_on(fake, lambda: True))
    graph = fake.cuda.graphs.CUDAGraph()
    graph.capture_begin()
    assert (taken(sources[0]), fake.snapshots) == ([], 0)
    graph.capture_end()
    assert (len(taken(sources[0], 2 * SECOND)), fake.snapshots) == (1, 1)


def test_many_holders_keep_the_largest_names(sources: list[TorchSource], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the holders of most bytes keep their names, and what the others hold is of several."""
    monkeypatch.setattr(maps, "MOST_HOLDERS", 2)
    fake = fragmented()
    sources.append(source_on(fake, lambda: True))
    (found,) = taken(sources[0])
    assert found.holders == (("weights", "tiny", None), ("several", "", None))
    by_holder = [0, 0]
    for segment in unpack(found.packed):
        for block in segment.blocks:
            if block.stack >= 0:
                by_holder[block.stack] += block.requested
    weights = 56 * MIB + 3 * MIB + 1000 + 300_000 + 2304
    caches = 2 * (3 * 40 * 64 * 1024 + 2 * 300 * 4 * 1024)
    assert by_holder == [weights, caches]


class Holder:
    """A source that knows holders and nothing else."""

    name = "holder"

    def __init__(self, fake: Mapped) -> None:
        self.held = fake.held

    def install(self, emit: model.Emit) -> None: ...

    def uninstall(self) -> None: ...

    def sample(self, now_ns: int) -> tuple[()]:
        return ()

    def availability(self) -> tuple[()]:
        return ()


def test_a_view_that_looks_gets_the_map_of_the_same_poll_as_the_metrics(tmp_path: Path) -> None:
    """Through runtime and store: after a touch the map is there, and its sums are the points of the same tick."""
    from kvobs.bus import Bus

    fake = fragmented()
    observed = runtime.Runtime(Config(store=tmp_path, prometheus=None, otlp="off"),
                               [TorchSource(Bus(8), fake), Holder(fake)])
    observed.start()
    try:
        observed.tick(sample=True)
        assert StoreReader(tmp_path).maps() == []
        assert touch(tmp_path)
        fake.grow("anna")
        observed.tick(sample=True)
        reader = StoreReader(tmp_path)
        (stored,) = reader.maps()
    finally:
        observed.stop()
    total, counted = sums(unpack(stored.record.packed)), fake.twin.stats()
    assert (total.reserved, total.allocated) == (counted.reserved, counted.allocated)
    points = {point.attributes["state"]: point.value for point in reader.points(
        "kvobs.allocator.usage", since_wall_ns=stored.wall_ns, until_wall_ns=stored.wall_ns + 2 * SECOND)}
    assert points == {"allocated": total.allocated, "unused": total.reserved - total.allocated}
    assert ("kv", "anna", 1) in stored.record.holders
    assert fake.snapshots >= 1


def test_a_look_is_over_after_ten_seconds(tmp_path: Path) -> None:
    """The age of the file that a view touches decides; without a file or a directory nobody looks."""
    import os
    import time

    assert not watched(None)
    assert not watched(tmp_path)
    assert touch(tmp_path / "kvobs-p-000001.sqlite")
    assert watched(tmp_path)
    os.utime(tmp_path / "kvobs.watch", (0, time.time() - 11))
    assert not watched(tmp_path)
    assert not touch(tmp_path / "missing" / "store.sqlite")
    (tmp_path / "kvobs.watch").unlink()
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "kvobs.watch").symlink_to(tmp_path / "elsewhere")
    assert not touch(tmp_path)


def test_recorded_stacks_tell_the_kind_of_what_nobody_is_known_to_hold(sources: list[TorchSource]) -> None:
    """A block with a stack of an optimizer is told as estimated from it; a cache's block stays the cache's."""
    fake = fragmented()
    state = fake.twin.alloc(5 * MIB)
    listed = fake.cuda.memory.memory_snapshot
    frames = [{"filename": "/x/site-packages/torch/optim/adam.py", "line": 7, "name": "_init_group"}]

    def snapshot(mempool_id: object = None, include_traces: bool = True) -> list[Any]:
        found: list[Any] = listed(mempool_id, include_traces)
        return [one | {"blocks": [block | {"frames": frames} for block in one["blocks"]]} for one in found]

    fake.cuda.memory.memory_snapshot = snapshot
    sources.append(source_on(fake, lambda: True))
    (found,) = taken(sources[0])
    said = {block.address: found.holders[block.stack] for segment in unpack(found.packed) for block in segment.blocks
            if block.state == ALLOCATED}
    assert said[state] == ("optimizer", maps.BY_STACK, None)
    assert {address: said[address] for address in (one.address for one in fake.held())} == {
        one.address: one.holder for one in fake.held()}
