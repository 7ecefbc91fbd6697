"""``kvobs explain`` on files whose truth is known: the recorder's own totals, hand-made layouts, broken files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shlex
import subprocess
import sys
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
    assert "60.00 MiB requested by" not in text  # no stack was recorded for it
    assert f"kvobs whatif {tmp_path / 'oom.pickle'} --search" in text


def test_whose_request_failed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The frames of the request that failed give who asked and for what, those of pinned blocks who holds back."""
    allocator = fragmented()
    with pytest.raises(OutOfMemory):
        allocator.alloc(60 * MIB, frames=CACHE)
    with pytest.raises(OutOfMemory):
        allocator.alloc(61 * MIB)
    allocator.dump(tmp_path / "oom.pickle")
    device, = explain(capsys, tmp_path / "oom.pickle")["devices"]
    asker = "cache_utils.py:120 update (from serve.py:10 generate)"
    assert [(oom["label"], oom["kind"]) for oom in device["ooms"]] == [(asker, "kv"), (None, "unknown")]
    assert {pin["label"] for pin in device["pins"]} == {asker}
    assert main(["explain", str(tmp_path / "oom.pickle")]) == 0
    text = capsys.readouterr().out
    assert f"60.00 MiB requested by {asker} (kv), the device had 40.00 MiB left: FRAGMENTED" in text
    assert "61.00 MiB requested, the device had" in text


def test_without_an_oom_the_text_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No request failed: that is a sentence, what-if is not proposed, and a definition without a value has a reason."""
    fragmented().dump(tmp_path / "state.pickle")
    assert main(["explain", str(tmp_path / "state.pickle")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  No out-of-memory event is recorded." in lines
    assert not any("whatif" in line for line in lines)
    extfrag, = (line for line in lines if line.startswith("extfrag"))
    assert extfrag.endswith("It is defined for a request, and none was given.")


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


HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202enr\nDevice 9: all well"


def hostile(folder: Path) -> Path:
    """A snapshot whose file name, frames, annotations and settings would act on a terminal."""
    allocator = RecordingAllocator(capacity=20 * MIB)
    allocator.alloc(4 * MIB, frames=[(HOSTILE, 1, HOSTILE), ("torch/nn/modules/module.py", 1, HOSTILE)])
    with pytest.raises(OutOfMemory):
        allocator.alloc(60 * MIB, frames=[(HOSTILE, 1, HOSTILE)])
    allocator.dump(folder / "made.pickle")
    document = pickle.loads((folder / "made.pickle").read_bytes())
    document["external_annotations"] = [{"device": 0, "name": HOSTILE, "stage": HOSTILE, "time_us": 1}]
    document["allocator_settings"] = {"PYTORCH_CUDA_ALLOC_CONF": HOSTILE, "roundup_power2_divisions": {HOSTILE: 3}}
    place = folder / (HOSTILE.replace("/", "") + ".pickle")
    place.write_bytes(pickle.dumps(document))
    return place


@pytest.mark.parametrize("command", [["explain", "--request", "8MiB"], ["whatif"], ["whatif", "--search"]])
def test_nothing_of_a_file_acts_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                              command: list[str]) -> None:
    """Of a file whose every name has escape sequences, line breaks and turned text only printable letters arrive."""
    assert main([*command, str(hostile(tmp_path))]) == 0
    told = capsys.readouterr()
    assert all(line.isprintable() for line in (told.out + told.err).split("\n"))
    assert "\nDevice 9" not in told.out


def test_a_refusal_names_a_hostile_file_in_plain_letters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence on stderr about a file that is not there has no letter that acts on a terminal."""
    assert main(["explain", str(tmp_path / HOSTILE.replace("/", ""))]) == 2
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


def run_closed(command: str, *, encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    """The command line with the shell's redirections, which may close streams."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    return subprocess.run(["sh", "-c", f"{shlex.quote(sys.executable)} -m kvobs {command}"], env=environment,
                          capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("redirected", "code"), [
    ("<&-", 0), (">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 2)])
def test_no_stream_is_needed(tmp_path: Path, redirected: str, code: int) -> None:
    """Closed streams change no outcome, and an output that cannot be written is one sentence and exit code 2."""
    fragmented().dump(tmp_path / "made.pickle")
    ran = run_closed(f"explain {shlex.quote(str(tmp_path / 'made.pickle'))} {redirected}")
    assert ran.returncode == code, ran.stderr
    assert ran.stderr == ("" if code == 0 else "kvobs: The output cannot be written (no space left on device).\n")
    assert (">" in redirected and redirected[:2] != "2>") or "5.00 MiB" in ran.stdout


def test_a_reader_that_leaves_is_no_error_message(tmp_path: Path) -> None:
    """Piped into a program that ends at once, the command ends too, in silence."""
    fragmented().dump(tmp_path / "made.pickle")
    ran = run_closed(f"explain {shlex.quote(str(tmp_path / 'made.pickle'))} --json | true")
    assert ran.stderr == ""


def test_letters_that_the_output_lacks_are_escaped(tmp_path: Path) -> None:
    """On an output that is ASCII only, other letters of a name are shown as escapes."""
    fragmented().dump(tmp_path / "cache \u00e4\U0001f600.pickle")
    ran = run_closed(f"explain {shlex.quote(str(tmp_path / 'cache ') + 'ä😀.pickle')}", encoding="ascii")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "cache \\xe4\\U0001f600.pickle: torch snapshot" in ran.stdout


def test_the_page_never_takes_the_files_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page with the name of the snapshot, or of a link to it, is refused and the snapshot stays as it was."""
    made = tmp_path / "made.pickle"
    fragmented().dump(made)
    (tmp_path / "link").symlink_to(made)
    before = made.read_bytes()
    for page in (made, tmp_path / "link"):
        assert main(["explain", str(made), "--html", str(page)]) == 2
        assert "take the place" in capsys.readouterr().err
    assert made.read_bytes() == before


def test_very_many_ooms_cost_little_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of 20,000 failed requests at the end is told in the JSON, the first and last of them with a verdict, and
    people are told how many more there are.
    """
    allocator = RecordingAllocator(capacity=20 * MIB)
    allocator.alloc(4 * MIB)
    for _ in range(20_000):
        with pytest.raises(OutOfMemory):
            allocator.alloc(60 * MIB)
    allocator.dump(tmp_path / "made.pickle")
    device, = explain(capsys, tmp_path / "made.pickle")["devices"]
    assert len(device["ooms"]) == 20_000
    judged = [index for index, oom in enumerate(device["ooms"]) if oom["verdict"] == "CAPACITY"]
    assert judged == [*range(64), *range(20_000 - 64, 20_000)]
    assert all(oom["verdict"] or "are judged" in oom["note"] for oom in device["ooms"])
    assert all(oom["reproduced"] for oom in device["ooms"])
    assert main(["explain", str(tmp_path / "made.pickle")]) == 0
    assert "19,936 more times out of memory" in capsys.readouterr().out


def test_a_segment_without_blocks_serves_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes that the file puts in no block are unexplained, and no request is served from them or by returning them."""
    (tmp_path / "made.json").write_text(json.dumps({"device_traces": [[]], "segments": [{
        "device": 0, "address": 200 * MIB, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
        "blocks": []}]}))
    device, = explain(capsys, tmp_path / "made.json", "--request", "8MiB", "--device-free", "0")["devices"]
    assert device["waste"]["unexplained_bytes"] == device["reserved_bytes"] == 20 * MIB
    assert device["requests"][0]["verdict"] == "CAPACITY"


def test_a_refusal_ends_with_one_full_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is switched off is refused in one sentence."""
    fragmented().dump(tmp_path / "made.pickle")
    monkeypatch.setenv("KVOBS_NATIVE", "off")
    assert main(["explain", str(tmp_path / "made.pickle"), "--engine", "C++"]) == 2
    assert capsys.readouterr().err == "kvobs: The C++ core is switched off (native=off).\n"
