"""The page Memory map, run by Streamlit's own test runner over real stores of a device that the twin serves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("altair")

from kvobs import model
from kvobs.allocator.memory_map import pack, sums, unpack
from kvobs.allocator.pinning import pins
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Segment
from kvobs.catalog import BY_NAME
from kvobs.store import StoreWriter, watched
from streamlit_app import memory_chart, memory_data
from tests.states import KIB, segment
from tests.unit.test_view_pages import read, run, text

MIB = 1024 * KIB
SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND
HOLDERS = (("kv", "anna", 1), ("weights", "tiny", None))
STATE = (
    segment(1 << 40, (2 * MIB, 2 * MIB - 5, ALLOCATED), (MIB, 0, INACTIVE), (MIB, MIB, PENDING)),
    segment((1 << 40) + 8 * MIB, (4 * MIB, 4 * MIB, ALLOCATED)),
    segment((1 << 40) + 16 * MIB, (512 * KIB, 500 * KIB, ALLOCATED), (1536 * KIB, 0, INACTIVE), small=True))


def held(state: tuple[Segment, ...] = STATE) -> tuple[Segment, ...]:
    """Anna has the first block of all, the model the second segment, nobody the rest."""
    owners = {1 << 40: 0, (1 << 40) + 8 * MIB: 1}
    return tuple(one._replace(blocks=tuple(block._replace(stack=owners.get(block.address, -1)) for block in one.blocks))
                 for one in state)


def a_map(t_ns: int = 0, device: str = "cuda:0", state: tuple[Segment, ...] | None = None, **fields: Any,
          ) -> model.MemoryMap:
    state = held() if state is None else state
    total = sums(state)
    values: dict[str, Any] = {
        "t_ns": t_ns, "device": device, "duration_ns": 3_000_000, "every_ns": 150_000_000, "steady": True,
        "reserved_bytes": total.reserved, "allocated_bytes": total.allocated, "active_bytes": total.active,
        "requested_bytes": total.requested, "segments": total.segments, "settings": "", "holders": HOLDERS,
        "packed": pack(state)}
    return model.MemoryMap(**values | fields)


def write(directory: Path, found: list[model.MemoryMap], *, off_by: int = 0, process: str = "p",
          facts: tuple[model.Availability, ...] = (), close: bool = True) -> StoreWriter:
    """A store with maps and the metrics of the same poll, half a second after them as the drain thread writes them."""
    now = [0]
    writer = StoreWriter(directory, 256 * MIB, process, clock=lambda: now[0], wall=lambda: WALL)
    writer.write([*found, *facts])
    now[0] = SECOND // 2
    usage: dict[tuple[str, ...], Any] = {}
    for one in found:
        usage |= {(one.device, "allocated"): float(one.allocated_bytes + off_by),
                  (one.device, "unused"): float(one.reserved_bytes - one.allocated_bytes)}
    writer.write_points([(BY_NAME["kvobs.allocator.usage"], usage)] if usage else [])
    writer.commit()
    if close:
        writer.close()
    return writer


def test_the_page_shows_the_sums_and_that_they_equal_the_metrics(tmp_path: Path) -> None:
    """The figures are the state's own sums, and the page says that they equal the metrics of the same poll."""
    write(tmp_path, [a_map()])
    found = run("memory", tmp_path)
    assert {metric.label: metric.value for metric in found.metric} == {
        "Reserved": "10.00 MiB", "Allocated": "6.50 MiB", "Pending free": "1.00 MiB", "Free": "2.50 MiB",
        "Largest free block": "1.50 MiB"}
    assert "equal the metrics of the same poll (2 of 2), to the byte" in text(found)
    assert "The process has ended: this map is of" in text(found)
    assert "3 segments, 6 blocks." in text(found)
    assert not found.error
    rows = found.table[0].value.to_dict("records")
    assert [(read(row["what"]), read(row["equal"])) for row in rows] == [
        ("reserved", "yes"), ("allocated", "yes"), ("active (allocated and pending)", "no metric"),
        ("requested (of active)", "no metric"), ("segments", "no metric")]


@pytest.mark.parametrize(("steady", "says"), [(True, "differ from the metrics of the same poll"),
                                              (False, "The engine allocated while this map was taken")])
def test_sums_that_differ_are_not_hidden(tmp_path: Path, steady: bool, says: str) -> None:
    """One byte of difference is an error on the page, or, where the engine went on meanwhile, is said to be that."""
    write(tmp_path, [a_map(steady=steady)], off_by=1)
    found = run("memory", tmp_path)
    assert says in text(found)
    assert bool(found.error) is steady
    assert "to the byte" not in text(found)


def test_opening_the_page_asks_for_maps(tmp_path: Path) -> None:
    """Whoever is observed learns of the page within its next second, from the first time it is drawn."""
    writer = write(tmp_path, [], close=False)
    try:
        assert not watched(tmp_path)
        found = run("memory", tmp_path)
        assert watched(tmp_path)
        assert memory_data.WAITING in text(found)
    finally:
        writer.close()


@pytest.mark.parametrize(("subject", "reason"), [
    ("torch: memory map", "No memory map: a ![x](http://evil.example) stands in the way."),
    ("torch", "torch has not been imported in this process.")])
def test_why_there_is_no_map_is_said_as_text(tmp_path: Path, subject: str, reason: str) -> None:
    """A running process's own reason is shown word for word, and nothing in it is read as markup."""
    writer = write(tmp_path, [], facts=(model.Availability(subject, False, reason),), close=False)
    try:
        found = run("memory", tmp_path)
    finally:
        writer.close()
    assert reason in text(found)
    assert not any("![x](" in str(element.value) for element in found.info)


def test_an_old_map_of_a_running_process_is_stale(tmp_path: Path) -> None:
    """A map of years ago is told as stale with the process's reason, and is shown all the same."""
    fact = model.Availability("torch: memory map", False, "No memory map: there are too many blocks.")
    writer = write(tmp_path, [a_map()], facts=(fact,), close=False)
    try:
        found = run("memory", tmp_path)
    finally:
        writer.close()
    assert "Stale: this map is" in text(found)
    assert fact.reason in text(found)
    assert found.metric


def test_ended_processes_and_stores_without_maps(tmp_path: Path) -> None:
    """An ended process without a map says that nobody looked; an empty directory says how to begin."""
    assert "kvobs run -- python serve.py" in text(run("memory", tmp_path))
    write(tmp_path, [])
    assert memory_data.ENDED in text(run("memory", tmp_path))


def test_several_devices_have_a_map_each(tmp_path: Path) -> None:
    """Each device of the process has its own heading, figures and bars."""
    write(tmp_path, [a_map(device="vgpu:0"), a_map(device="vgpu:1", state=held()[:1])])
    found = run("memory", tmp_path)
    assert [read(heading.value) for heading in found.subheader] == ["vgpu:0", "vgpu:1"]
    assert [metric.value for metric in found.metric if metric.label == "Reserved"] == ["10.00 MiB", "4.00 MiB"]
    assert len(found.get("vega_lite_chart")) == 4


def test_charts_say_who_holds_what_and_what_is_pinned(tmp_path: Path) -> None:
    """The chart's parts are the state's blocks with their holders, and its pins those of the twin's definition."""
    write(tmp_path, [a_map()])
    (device,) = memory_data.maps(str(tmp_path), None).devices
    parts = [(row["what"], row["size"].partition(" (")[0], row["holder"]) for row in memory_chart.rows_of(device)]
    assert parts == [
        ("KV anna #1", "2.00 MiB", "KV of session anna, cache #1"), ("free", "1.00 MiB", "nobody"),
        ("pending free", "1.00 MiB", "nobody"), ("weights", "4.00 MiB", "weights of tiny"),
        ("other", "512.00 KiB", "not known"), ("free", "1.50 MiB", "nobody")]
    chart = memory_chart.segments(device, memory_chart.colours({part[0] for part in parts}, {}))
    drawn = json.dumps(chart.to_dict())
    expected = pins(STATE, Settings())
    assert [(pin.address, pin.held_back_bytes) for pin in expected] == [
        ((1 << 40) + 16 * MIB, 1536 * KIB), (1 << 40, MIB)]
    assert drawn.count('"pinned": "\\u25c6 pins') == len(expected)


def covered(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of each bar that its parts cover, having checked that they follow one another."""
    ends: dict[str, float] = {}
    for row in rows:
        assert row["begin"] == pytest.approx(ends.get(row["segment"], 0.0), abs=1e-9)
        ends[row["segment"]] = row["end"]
    return ends


def test_thousands_of_segments_become_few_bars_that_lose_nothing(tmp_path: Path) -> None:
    """The bars and the one of all other segments add up to every byte, and the drawn parts are bounded."""
    state = tuple(segment((1 << 40) + index * 64 * MIB, *[
        (KIB * (1 + (index * part) % 40), KIB, ALLOCATED if part % 3 else INACTIVE) for part in range(1, 8)],
        stream=index % 2) for index in range(2_500))
    write(tmp_path, [a_map(state=state)])
    (device,) = memory_data.maps(str(tmp_path), None).devices
    rows = memory_chart.rows_of(device)
    ends = covered(rows)
    assert len(ends) == memory_chart.BARS + 1
    assert all(end == pytest.approx(1.0) for end in ends.values())
    assert len(rows) <= memory_chart.BARS * memory_chart.PARTS
    drawn = sum(int(row["size"].partition(" (")[2].removesuffix(" B)").replace(",", "")) for row in rows)
    assert drawn == sum(one.size for one in state)
    (more,) = {row["segment"] for row in rows if "more segments" in row["segment"]}
    assert more.startswith(f"{2_500 - memory_chart.BARS:,} more segments · ")
    assert not run("memory", tmp_path).error


def test_narrow_blocks_are_drawn_together_and_say_how_many(tmp_path: Path) -> None:
    """A segment of thousands of small blocks has few parts, which still cover it whole."""
    state = (segment(1 << 40, *[(512, 500, ALLOCATED if part % 2 else INACTIVE) for part in range(4_000)]),)
    write(tmp_path, [a_map(state=state)])
    (device,) = memory_data.maps(str(tmp_path), None).devices
    rows = memory_chart.rows_of(device)
    assert len(rows) <= 2 * memory_chart.PARTS
    assert set(covered(rows).values()) == {1.0}
    counted = sum(int(row["state"].partition(" blocks")[0].replace(",", "")) if "blocks" in row["state"] else 1
                  for row in rows)
    assert counted == 4_000


def test_colours_stay_with_their_cache() -> None:
    """A cache keeps its colour when others end or begin, and no two of those shown have the same one."""
    first = memory_chart.colours({"KV a #1", "KV b #2", "weights", "free"}, {})
    then = memory_chart.colours({"KV b #2", "KV c #3", "weights", "free", "other"}, first)
    assert then["KV b #2"] == first["KV b #2"]
    assert len(set(then.values())) == len(then)


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "![x](http://evil.example)", "a\nb", "`**`", ""])
def test_hostile_sessions_are_text(tmp_path: Path, name: str) -> None:
    """Whatever a session or a device is called, the page renders, and none of it is read as markup."""
    write(tmp_path, [a_map(device=name or "x", holders=(("kv", name, 1), (name or "k", name, None)))])
    found = run("memory", tmp_path)
    said = [str(element.value) for kind in (found.markdown, found.caption, found.subheader, found.warning)
            for element in kind]
    said += [str(cell) for table in found.table for cell in table.value.to_numpy().ravel()]
    assert not [one for one in said if re.search(r"(?<!\\)[<\[\]`*$#|]", one)]


def test_a_damaged_map_is_named(tmp_path: Path) -> None:
    """A map that cannot be unpacked is one sentence on the page, beside the maps of other devices."""
    write(tmp_path, [a_map(device="cuda:1"), a_map(device="cuda:0", packed=b"no map")])
    found = run("memory", tmp_path)
    assert "The map of cuda:0 cannot be read: These bytes are not a memory map" in text(found)
    assert [read(heading.value) for heading in found.subheader] == ["cuda:1"]


def test_a_map_round_trips_through_the_page(tmp_path: Path) -> None:
    """What the page unpacks is the state that was packed."""
    write(tmp_path, [a_map()])
    (device,) = memory_data.maps(str(tmp_path), None).devices
    assert device.state == held() == unpack(device.found.packed)
