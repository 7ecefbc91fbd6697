"""Snapshots of every age: what is read is what the document says, value for value, and contradictions are told."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator.readers import Unreadable, _formats, read
from kvobs.allocator.recording import (
    ACTIONS,
    ALLOC,
    OOM,
    OTHER,
    UNKNOWN,
    Annotation,
    Recording,
)
from kvobs.allocator.settings import Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING, Block, Segment
from tests.fuzz import documents
from tests.fuzz.documents import BASE, MIB

FRAMES = (("model.py", 7, "forward"), ("serve.py", 70_000, "<module>"))
WRITERS: dict[str, Callable[[Any], bytes]] = {
    "pickle 2": lambda document: pickle.dumps(document, 2), "pickle 4": lambda document: pickle.dumps(document, 4),
    "pickle 5": lambda document: pickle.dumps(document, 5), "json": lambda document: json.dumps(document).encode(),
    "indented json": lambda document: json.dumps(document, indent=2).encode(),
    "pickle.gz": lambda document: gzip.compress(pickle.dumps(document)),
    "json.gz of two members": lambda document: gzip.compress(json.dumps(document).encode()[:99])
    + gzip.compress(json.dumps(document).encode()[99:]),
}


def parsed(document: Any) -> Recording:
    return _formats.parse(pickle.dumps(document), "x")


@pytest.mark.parametrize("form", WRITERS)
def test_every_form_of_a_modern_snapshot_gives_the_same(tmp_path: Path, form: str) -> None:
    """Pickled by any protocol, as JSON, packed: events, states, pools, stacks, settings and marks are as written."""
    path = tmp_path / "any name"
    path.write_bytes(WRITERS[form](documents.modern()))
    found = read(path)
    assert found.file == str(path)
    assert found.schema == "torch snapshot (2026: events name their pool)"
    assert found.pools == ((0, 0), (0, 1))
    assert [device.device for device in found.devices] == [0, 1]
    first, second = found.devices
    assert [ACTIONS[action] for action in first.events.action] == [
        "segment_alloc", "alloc", "alloc", "free_requested", "free_completed", "segment_map", "segment_unmap",
        "segment_free", "oom", "snapshot", "other"]
    assert list(first.events.address) == [BASE, BASE, *[BASE + 1024] * 3, *[BASE + 64 * MIB] * 2, BASE + 4 * MIB,
                                          123_456, 0, 0]
    assert list(first.events.size) == [2 * MIB, 1000, 600, 600, 600, 20 * MIB, 20 * MIB, 2 * MIB, 1 << 30, 2 * MIB, 0]
    assert list(first.events.time_us) == [1_783_000_000_000_000 + step for step in range(1, 12)]
    assert set(first.events.stream) == set(first.events.pool) == {0}
    assert {found.stacks.of(stack) for stack in first.events.stack} == {FRAMES}
    assert first.events.address[list(first.events.action).index(OOM)] == 123_456
    assert len(second.events) == 0
    stack = found.stacks.stacks.index((0, 1))
    blocks = (Block(BASE, 1024, 1000, ALLOCATED, stack), Block(BASE + 1024, 512, 500, PENDING),
              Block(BASE + 1536, 2 * MIB - 1536, 0, INACTIVE))
    assert first.state == (Segment(BASE, 2 * MIB, 0, 0, True, False, blocks),)
    assert second.state == (Segment(BASE, 2 * MIB, 0, 1, True, True, blocks),)
    assert first.annotations == (Annotation("step", "START", 1_783_000_000_000_001),)
    settings = found.settings
    assert settings is not None
    assert (settings.max_split_size, settings.garbage_collection_threshold, settings.expandable_segments) == (
        64 * MIB, 0.5, True)
    # Four divisions from 512 MiB on, none below.
    assert settings.round_size(513 * MIB) == 640 * MIB
    assert settings.round_size(300 * MIB + 1) == 300 * MIB + 512


def test_a_large_snapshot_of_protocol_2_reads_like_one_of_protocol_4() -> None:
    """With more memo entries than two bytes can number, the older form (that of torch's C++ pickler) gives the same."""
    document = documents.modern()
    document["device_traces"][0] *= 4000
    for index, event in enumerate(document["device_traces"][0]):
        document["device_traces"][0][index] = {**event, "frames": [*event["frames"]]}
    old, new = pickle.dumps(document, 2), pickle.dumps(document, 4)
    assert b"r\x01\x00\x01\x00" in old  # LONG_BINPUT 65537
    assert _formats.parse(old, "x") == _formats.parse(new, "x")


def test_whole_numbers_of_eight_bytes_are_read() -> None:
    """torch's C++ pickler writes every number beyond 32 bits with eight bytes, whether it needs them or not."""
    data = pickle.dumps(documents.segments(), 4)
    address = b"\x8a\x06" + BASE.to_bytes(6, "little")
    assert address in data
    longer = data.replace(address, b"\x8a\x08" + BASE.to_bytes(8, "little"))
    longer = longer[:2] + b"\x95" + (len(longer) - 11).to_bytes(8, "little") + longer[11:]
    assert _formats.parse(longer, "x") == _formats.parse(data, "x")


def test_a_byte_order_mark_before_json_is_no_error() -> None:
    """Editors on Windows put one there."""
    data = json.dumps(documents.modern()).encode()
    assert _formats.parse(b"\xef\xbb\xbf" + data, "x") == _formats.parse(data, "x")


def test_a_snapshot_of_2023_is_read() -> None:
    """Addresses are running sums, requests and frames come from the newest entry of a block's history."""
    found = parsed(documents.of_2023())
    assert found.schema == "torch snapshot (2023: blocks without addresses, events without times)"
    assert found.settings is None
    (device,) = found.devices
    assert device.state == (Segment(BASE, 2 * MIB, 0, 0, True, False, (
        Block(BASE, 1024, 1000, ALLOCATED, 0), Block(BASE + 1024, 512, 500, PENDING),
        Block(BASE + 1536, 2 * MIB - 1536, 2 * MIB - 1536, INACTIVE))),)
    assert found.stacks.of(0) == FRAMES
    assert list(device.events.time_us) == list(device.events.stack) == list(device.events.pool) == [UNKNOWN]
    assert found.notes == ()  # the mark that a snapshot leaves has no time, and is no event of the program


@pytest.mark.parametrize("form", ["pickle 4", "json"])
def test_a_list_of_segments_is_read(form: str) -> None:
    """What memory_snapshot() gives has states and pools, and says that there is no history."""
    found = _formats.parse(WRITERS[form](documents.segments()), "x")
    assert found.schema == "torch list of segments (late 2023 on: blocks with addresses)"
    assert [(segment.address, segment.pool) for segment in found.devices[0].state] == [(BASE, 0), (BASE + 2 * MIB, 1)]
    assert found.pools == ((0, 0), (0, 3))
    assert any("no history" in note for note in found.notes)


def test_ages_are_told_by_their_keys() -> None:
    """Taking away what newer versions added leads back through the years."""
    document = documents.modern(pool_of_events=False)
    ages = [parsed(document).schema]
    for event in document["device_traces"][0]:
        del event["user_metadata"]
    ages.append(parsed(document).schema)
    for event in document["device_traces"][0]:
        del event["compile_context"]
    ages.append(parsed(document).schema)
    for key in ("external_annotations", "allocator_settings"):
        del document[key]
        ages.append(parsed(document).schema)
    assert [age.split("(")[1].split(":")[0] for age in ages] == [
        "late 2025 on", "2025 on", "late 2024 on", "2024 on", "late 2023 on"]


def test_segments_come_in_order_of_address_per_device() -> None:
    """However the file orders segments and blocks, a state is in order of address."""
    document = documents.segments()[::-1]
    document[0]["blocks"].reverse()
    (device,) = parsed(document).devices
    assert [segment.address for segment in device.state] == [BASE, BASE + 2 * MIB]
    assert all([block.address for block in segment.blocks] == sorted(block.address for block in segment.blocks)
               for segment in device.state)


def test_absent_keys_have_meanings() -> None:
    """Without type a segment is small up to 2 MiB; without pool, stream, device and frames it is the default's."""
    plain = {"address": BASE, "total_size": 2 * MIB, "blocks": [{"size": 2 * MIB, "state": "active_allocated"}]}
    large = {"address": BASE + 4 * MIB, "total_size": 4 * MIB, "blocks": [{"size": 4 * MIB, "state": "inactive"}]}
    (device,) = parsed([plain, large]).devices
    assert device.state == (
        Segment(BASE, 2 * MIB, 0, 0, True, False, (Block(BASE, 2 * MIB, 2 * MIB, ALLOCATED),)),
        Segment(BASE + 4 * MIB, 4 * MIB, 0, 0, False, False, (Block(BASE + 4 * MIB, 4 * MIB, 4 * MIB, INACTIVE),)))


def test_the_older_word_for_a_pending_free_is_known() -> None:
    """active_awaiting_free, as documented before 2.1, is a pending free."""
    block = {"size": 2 * MIB, "state": "active_awaiting_free"}
    (device,) = parsed([{"address": BASE, "total_size": 2 * MIB, "blocks": [block]}]).devices
    assert device.state[0].blocks[0].state == PENDING


def test_events_without_fields_are_kept_as_other() -> None:
    """An event that lacks its address or size keeps its place, is of no known kind, and is counted in a note."""
    document = documents.modern()
    del document["device_traces"][0][1]["addr"], document["device_traces"][0][3]["size"]
    found = parsed(document)
    actions = list(found.devices[0].events.action)
    assert (actions[1], actions[3], actions[2]) == (OTHER, OTHER, ALLOC)
    assert len(actions) == 11
    assert any("3 events are of a kind" in note for note in found.notes)


def test_equal_frames_are_one_stack_whether_they_are_one_object_or_not() -> None:
    """Stacks are told apart by what they say alone."""
    document = documents.modern()
    for index, event in enumerate(document["device_traces"][0]):
        event["frames"] = [{"name": "f", "filename": "a.py", "line": index % 3}]
    found = parsed(document)
    assert [found.stacks.of(stack)[0][1] for stack in found.devices[0].events.stack] == [
        index % 3 for index in range(11)]
    assert len(found.stacks.stacks) == 3 + 1  # and that of the blocks


def test_contradictions_are_told() -> None:
    """Each kind of contradiction is one sentence with its count and bytes."""
    document = documents.modern()
    whole, _ = document["segments"]
    whole["blocks"].pop()
    document["segments"].append(whole | {"address": BASE + MIB, "total_size": 0, "blocks": [
        {"address": BASE + MIB + 8, "size": 256, "requested_size": 999, "state": "active_allocated", "frames": []}]})
    trace = document["device_traces"][0]
    del trace[3]
    trace.insert(3, trace[1])
    trace.append(trace[1] | {"addr": BASE + 77})
    assert set(parsed(document).notes) == {
        "1 segment has an allocated_size that its blocks contradict, by 768 bytes in all.",
        "1 segment has an active_size that its blocks contradict, by 1,280 bytes in all.",
        f"Device 0: 1 segment is not filled by its blocks, {2 * MIB - 1536:,} bytes belong to no block.",
        "Device 0: 1 segment is smaller than its blocks together, by 256 bytes in all.",
        "Device 0: 1 segment has size 0.",
        "Device 0: 1 segment reaches into the next one.",
        "Device 0: 1 segment has blocks that leave a hole, overlap, or begin elsewhere.",
        "Device 0: 1 block has an address or size that is no multiple of 512.",
        "Device 0: 1 block is smaller than what was requested.",
        "Device 0: 1 free was completed without having been requested.",
        "Device 0: 1 alloc is at an address that is allocated already.",
        "Device 0: 1 event has an address that is no multiple of 512.",
        "Device 0: 1 event is of a kind that kvobs does not know, or without an address or size.",
        "Device 0: 1 alloc is alive at the end of the history, and no such block is in the last state.",
    }


def test_a_sound_snapshot_gets_no_notes() -> None:
    """Where everything agrees, nothing is said: no false alarm."""
    document = documents.modern()
    document["device_traces"][0].pop()
    assert parsed(document).notes == ()


def test_an_empty_snapshot_says_so() -> None:
    """No segments and no events is an answer, not an error."""
    found = parsed({"segments": [], "device_traces": [[], []]})
    assert found.devices == ()
    assert found.notes == ("The snapshot is empty: no device has segments or events.",)


def test_impossible_settings_are_told_and_left_out() -> None:
    """Settings of other types do not stop the reading; they are unknown, with the reason."""
    document = documents.modern()
    document["allocator_settings"]["garbage_collection_threshold"] = "much"
    found = parsed(document)
    assert found.settings is None
    assert any("garbage_collection_threshold has an impossible value" in note for note in found.notes)
    document["allocator_settings"] = None
    assert parsed(document).settings is None
    assert parsed({"segments": documents.segments(), "allocator_settings": {}}).settings == Settings()


WRONG: list[tuple[str, Any]] = [
    ("address", True), ("address", -1), ("address", 1.5), ("address", "7"), ("address", None), ("address", 1 << 63),
    ("address", 1 << 200), ("total_size", -512), ("total_size", 1 << 51), ("total_size", float("nan")),
    ("stream", 1 << 63), ("stream", None), ("device", -1), ("device", 128), ("blocks", 5), ("blocks", [5]),
    ("blocks", [{"size": 512, "state": "lost"}]), ("blocks", [{"size": 512, "state": ["inactive"]}]),
    ("blocks", [{"size": -1, "state": "inactive"}]), ("segment_pool_id", (0,)), ("segment_pool_id", "00"),
    ("segment_pool_id", [0, -1]), ("segment_type", "middle"), ("segment_type", ["small"]), ("is_expandable", 1),
    ("frames", "main"), ("frames", [7]), ("frames", [{"name": "f", "filename": "a"}]),
    ("frames", [{"name": "f" * 20_000, "filename": "a", "line": 1}]),
    ("frames", [{"name": "f", "filename": "a", "line": 1 << 40}]),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{key}-{str(value)[:20]}" for key, value in WRONG])
def test_wrong_values_in_a_segment_are_refused(key: str, value: Any) -> None:
    """Another type, a negative size, a huge number: one sentence, no other exception."""
    document = documents.segments()
    document[0][key] = value
    with pytest.raises(ValueError, match=r"^[A-Z].*\.$"):
        parsed(document)


@pytest.mark.parametrize(("key", "value"), [
    ("action", None), ("action", 5), ("action", []), ("addr", True), ("addr", -1), ("addr", "x"), ("size", -1),
    ("size", 1 << 51), ("size", 1.0), ("stream", "0"), ("time_us", 1.5), ("time_us", -2), ("time_us", 1 << 62),
    ("frames", 7), ("frames", {}), ("frames", {"name": 1}), ("pool_id", 0), ("pool_id", [[], 1])])
@pytest.mark.parametrize("form", ["pickle 4", "json"])
def test_wrong_values_in_an_event_are_refused(form: str, key: str, value: Any) -> None:
    """The same for events, from pickles and from JSON."""
    document = documents.modern()
    document["device_traces"][0][1][key] = value
    with pytest.raises(ValueError, match=r"^[A-Z].*\.$"):
        _formats.parse(WRITERS[form](document), "x")


@pytest.mark.parametrize("document", [
    7, "text", None, {}, {"a": 1}, [1], {"segments": 5}, {"device_traces": [5]}, {"device_traces": {}},
    {"device_traces": [[5]]}, {"segments": [], "device_traces": 7}, {"segments": [], "allocator_settings": 7},
    {"segments": [], "external_annotations": 7}])
def test_other_documents_are_refused(tmp_path: Path, document: Any) -> None:
    """A file of plain data that is no snapshot is refused in one sentence with its name."""
    path = tmp_path / "other.pickle"
    path.write_bytes(pickle.dumps(document))
    with pytest.raises(Unreadable, match=r"other\.pickle cannot be read: [a-z].*\.$"):
        read(path)
