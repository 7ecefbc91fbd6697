"""``kvobs explain`` on files whose truth is known: the recorder's own totals, hand-made layouts, broken files."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import OutOfMemory
from kvobs.cli import main
from tests.support import ROOT

SHARED = ROOT.parent / "shared" / "data"
CACHE = [("/usr/lib/python3/site-packages/transformers/cache_utils.py", 120, "update"), ("serve.py", 10, "generate")]
# The contract of the command, key by key.
DEVICE_KEYS = {"device", "reserved_bytes", "allocated_bytes", "active_bytes", "pending_free_bytes",
               "largest_free_bytes", "free_bytes", "segments", "expandable", "definitions", "waste", "replay", "ooms",
               "holders"}
REPLAY_KEYS = {"events", "addresses", "device_allocs", "device_frees", "usable", "reason"}


def explain(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    assert main(["explain", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fragmented() -> RecordingAllocator:
    """20 segments of 10 MiB in two halves each, every second half freed: 100 MiB free in pieces of 5 MiB.

    The device has 240 MiB: 40 MiB of it are left.
    """
    allocator = RecordingAllocator(Settings(large_segment_size=20 * MIB), capacity=240 * MIB)
    blocks = [allocator.alloc(5 * MIB, frames=CACHE) for _ in range(40)]
    for address in blocks[::2]:
        allocator.free(address)
    return allocator


def test_totals_verdict_and_replay_of_a_real_course_of_events(tmp_path: Path,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """Memory that is free in pieces only: the verdict is FRAGMENTED, and all sums are the allocator's."""
    allocator = fragmented()
    with pytest.raises(OutOfMemory):
        allocator.alloc(60 * MIB, frames=CACHE)
    allocator.dump(tmp_path / "oom.pickle")
    document = explain(capsys, tmp_path / "oom.pickle")
    assert set(document) >= {"file", "schema", "devices"}
    device, = document["devices"]
    assert set(device) >= DEVICE_KEYS
    assert set(device["replay"]) >= REPLAY_KEYS
    stats = allocator.stats()
    assert device["reserved_bytes"] == stats.reserved == 200 * MIB
    assert device["allocated_bytes"] == stats.allocated == 100 * MIB
    assert device["active_bytes"] == stats.active
    assert device["free_bytes"] == 100 * MIB
    assert device["largest_free_bytes"] == 5 * MIB
    assert sum(device["waste"].values()) == device["reserved_bytes"]
    assert device["waste"]["gaps_bytes"] == 100 * MIB
    assert device["waste"]["unexplained_bytes"] == 0
    oom, = device["ooms"]
    assert (oom["requested_bytes"], oom["device_free_bytes"]) == (60 * MIB, 40 * MIB)
    assert oom["verdict"] == "FRAGMENTED"
    assert oom["evidence"]["total_free_bytes"] == 100 * MIB
    assert device["replay"]["usable"]
    assert device["replay"]["addresses"] == {"checked": 40, "matched": 40}
    assert device["replay"]["device_allocs"] == {"checked": 10, "matched": 10}
    assert device["holders"][0]["kind"] == "kv"
    assert device["holders"][0]["bytes"] == 100 * MIB


def test_a_request_that_was_never_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same layout: 5 MiB are served, 60 MiB are not, unless the device had 60 MiB."""
    fragmented().dump(tmp_path / "state.pickle")
    for size, left, verdict in (("5MiB", "0", "SERVED"), ("60MiB", "40MiB", "FRAGMENTED"), ("60MiB", "60MiB", "GROW"),
                                ("500MiB", "0", "CAPACITY")):
        document = explain(capsys, tmp_path / "state.pickle", "--request", size, "--device-free", left)
        assert document["devices"][0]["requests"][0]["verdict"] == verdict


def test_json_and_gzip_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same snapshot as pickle, JSON, and either of them compressed, gives the same devices."""
    document = fragmented().snapshot_document()
    forms = {"a.pickle": pickle.dumps(document), "b.json": json.dumps(document).encode()}
    forms |= {f"{name}.gz": gzip.compress(data) for name, data in forms.items()}
    found = []
    for name, data in forms.items():
        (tmp_path / name).write_bytes(data)
        found.append(explain(capsys, tmp_path / name)["devices"])
    assert found[0][0]["replay"]["addresses"]["matched"] == 40
    assert all(devices == found[0] for devices in found)


def test_conclusions_need_a_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without events: state and waste stand, the replay says why there is none, and no peak is made up."""
    document = fragmented().snapshot_document() | {"device_traces": [[]]}
    (tmp_path / "state.pickle").write_bytes(pickle.dumps(document))
    device, = explain(capsys, tmp_path / "state.pickle")["devices"]
    assert not device["replay"]["usable"]
    assert "no history" in device["replay"]["reason"]
    assert device["waste"]["gaps_bytes"] == 100 * MIB
    assert device["peak"] is None
    assert device["definitions"]["gmlake"] is None
    assert device["definitions"]["pytorch_29554"] == 0.5


def test_people_read_the_verdict_and_the_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text has the verdict, how far the replay agrees, and every byte of the waste."""
    allocator = fragmented()
    with pytest.raises(OutOfMemory):
        allocator.alloc(60 * MIB)
    allocator.dump(tmp_path / "oom.pickle")
    assert main(["explain", str(tmp_path / "oom.pickle")]) == 0
    text = capsys.readouterr().out
    assert "FRAGMENTED" in text
    assert "40/40 addresses" in text
    assert "104,857,600" in text


def test_the_page_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--html leaves one page there; where it cannot, one sentence says so and nothing is left."""
    fragmented().dump(tmp_path / "state.pickle")
    page = tmp_path / "report.html"
    assert main(["explain", str(tmp_path / "state.pickle"), "--html", str(page)]) == 0
    assert "</html>" in page.read_text(encoding="utf-8")[-20:]
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "state.pickle"), "--html", str(tmp_path / "no" / "report.html")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(("arguments", "words"), [
    (["--request", "many"], "512MiB"), (["--request", "0"], "out of range"), (["--stream", "3"], "--request"),
    (["--engine", "Fortran"], "auto, C++, Python"), (["--device-free", "1GiB"], "--request")])
def test_bad_options_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str],
                                      words: str) -> None:
    """What is no size, no engine or no combination ends with exit code 2 and one sentence that says what is allowed."""
    fragmented().dump(tmp_path / "state.pickle")
    assert main(["explain", str(tmp_path / "state.pickle"), *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err
    assert len(told.err.splitlines()) == 1


@pytest.mark.parametrize("broken", ["absent", "directory", "empty", "text", "truncated", "global", "bomb"])
def test_broken_files_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: str) -> None:
    """Whatever is wrong with a file ends with exit code 2 and one sentence that names it."""
    path = tmp_path / "file.pickle"
    whole = pickle.dumps(fragmented().snapshot_document())
    contents = {"empty": b"", "text": b"Hello, world.\n", "truncated": whole[: len(whole) // 2],
                "global": pickle.dumps(print), "bomb": b"\x80\x02Nr\xff\xff\xff\xff."}
    if broken == "directory":
        path.mkdir()
    elif broken in contents:
        path.write_bytes(contents[broken])
    assert main(["explain", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "file.pickle" in told.err
    assert len(told.err.splitlines()) == 1


def test_a_trace_of_a_profiler(capsys: pytest.CaptureFixture[str]) -> None:
    """The public trace's 24 cudaMalloc and 15 cudaFree are told, with nothing made up about blocks."""
    path = SHARED / "profiler" / "alexnet_trace.json.gz"
    if not path.exists():
        pytest.skip(f"The public traces are not at {SHARED.relative_to(ROOT.parent)} beside the project.")
    document = explain(capsys, path)
    assert {call["name"]: call["count"] for call in document["device_calls"]}.items() >= {
        "cudaMalloc": 24, "cudaFree": 15}.items()
    assert document["devices"] == []
