"""``kvobs whatif`` on snapshots of the recorder whose figures are known by hand."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import OutOfMemory
from kvobs.cli import main
from tests.support import run_child

CACHE = "/usr/lib/python3/site-packages/transformers/cache_utils.py"
CALLER = ("serve.py", 10, "generate")


@pytest.fixture
def bursts(tmp_path: Path) -> Path:
    """8 x 16 MiB, freed, then 4 x 32 MiB, on a device without limit."""
    allocator = RecordingAllocator()
    for address in [allocator.alloc(16 * MIB) for _ in range(8)]:
        allocator.free(address)
    for _ in range(4):
        allocator.alloc(32 * MIB)
    allocator.dump(tmp_path / "bursts.pickle")
    return tmp_path / "bursts.pickle"


@pytest.fixture
def growing(tmp_path: Path) -> Path:
    """K and V of one layer grow by torch.cat, 2 MiB a token, on a device of 48 MiB: three tensors of 8 tokens fill it,
    so that cat fails before the ninth, where blocks of 2 MiB need two segments of 20 for ten tokens each.
    """
    allocator = RecordingAllocator(Settings(), 48 * MIB)
    held: dict[int, int] = {}

    def grow(tokens: int) -> None:
        for line in (120, 121):
            new = allocator.alloc(2 * MIB * tokens, frames=[(CACHE, line, "update"), CALLER])
            if line in held:
                allocator.free(held[line])
            held[line] = new

    with contextlib.suppress(OutOfMemory):
        for tokens in range(1, 10):
            grow(tokens)
    allocator.dump(tmp_path / "growing.pickle")
    return tmp_path / "growing.pickle"


def whatif(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    assert main(["whatif", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_document_compares_before_and_after(bursts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """256 MiB in segments, 140 in expandable ones, 256 recorded; everything is marked as modelled."""
    document = whatif(capsys, bursts, "--set", "expandable_segments=true")
    assert set(document) == {"file", "schema", "devices"}
    device, = document["devices"]
    assert (device["device"], device["modelled"]) == (0, True)
    assert device["before"]["peak_reserved_bytes"] == device["recorded"]["peak_reserved_bytes"] == 256 * MIB
    assert device["after"]["peak_reserved_bytes"] == 140 * MIB
    assert device["after"]["settings"] == "expandable_segments:True"
    assert device["before"]["device_allocs"] == device["recorded"]["device_allocs"] == 12
    assert device["recorded"]["difference_bytes"] == 0
    assert device["recorded"]["peak_allocated_bytes"] == 128 * MIB
    assert device["verdicts_changed"] == []
    assert device["unknown"]


def test_a_capacity_changes_verdicts(bursts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 100 MiB two of eight requests of 16 MiB do not fit, and one of four of 32 MiB: three verdicts change."""
    device, = whatif(capsys, bursts, "--capacity", "100MiB")["devices"]
    assert device["before"]["capacity_bytes"] is None
    assert device["after"]["capacity_bytes"] == 100 * MIB
    changes = [(one["requested_bytes"], one["before"], one["after"]) for one in device["verdicts_changed"]]
    assert changes == [(16 * MIB, "succeeds", "CAPACITY")] * 2 + [(32 * MIB, "succeeds", "CAPACITY")]


def test_the_kv_cache_grows_otherwise(growing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both tensors are found by their frames; in blocks nothing is copied and the request that failed is served."""
    device, = whatif(capsys, growing, "--kv-growth", "paged:1")["devices"]
    assert (device["kv"]["chains"], device["kv"]["token_bytes"]) == (2, [2 * MIB])
    assert device["kv"]["copied_bytes_before"] > device["kv"]["copied_bytes_after"] == 0
    assert (device["recorded"]["ooms"], device["before"]["ooms"], device["after"]["ooms"]) == (1, 1, 0)
    assert device["verdicts_changed"][0]["after"] == "succeeds"


def test_the_search_prints_the_line_to_set(bursts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best setting is named as the line of the environment, in the table's text and in the document."""
    device, = whatif(capsys, bursts, "--search")["devices"]
    assert device["search"]["line"] == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert device["search"]["modelled"] is True
    assert device["search"]["ranking"][0]["peak_reserved_bytes"] == 140 * MIB
    assert main(["whatif", str(bursts), "--search"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in lines
    peak, = (line.split() for line in lines if line.startswith("peak reserved"))
    assert peak == ["peak", "reserved", "256.00", "MiB", "256.00", "MiB", "140.00", "MiB"]
    assert any("modelled" in line for line in lines)
    tried = next(at for at, line in enumerate(lines) if "settings that were tried" in line)
    assert lines[tried + 2].split()[:4] == ["expandable_segments:True", "0", "140.00", "MiB"]


def test_options_are_taken_as_the_environment_has_them(bursts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OPTION:VALUE, as a recommended line has it, means OPTION=VALUE, also where the value has colons."""
    documents = [whatif(capsys, bursts, "--set", f"expandable_segments{sign}True", "--set",
                        f"roundup_power2_divisions{sign}[256:1,512:2,>:4]") for sign in ":="]
    assert documents[0] == documents[1]
    assert documents[0]["devices"][0]["after"]["settings"].startswith("expandable_segments:True,roundup_power2")


def test_people_are_shown_ten_requests_and_how_many_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 40 requests of 20 MiB twelve fit into 240 MiB: of the 28 that end otherwise ten are listed, 18 counted."""
    allocator = RecordingAllocator()
    for _ in range(40):
        allocator.alloc(20 * MIB)
    allocator.dump(tmp_path / "many.pickle")
    assert main(["whatif", str(tmp_path / "many.pickle"), "--capacity", "240MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("20,971,520  succeeds" in line for line in lines) == 10
    assert "and 18 more" in lines


def test_without_a_change_the_options_are_named(bursts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison of the same with the same says that nothing was changed; any change takes that away."""
    said = []
    for arguments in ([], ["--set", "expandable_segments=True"], ["--capacity", "1GiB"], ["--search"]):
        assert main(["whatif", str(bursts), *arguments]) == 0
        said.append("Nothing was changed" in capsys.readouterr().out)
    assert said == [True, False, False, False]


@pytest.mark.parametrize(("arguments", "named"), [
    (["--set", "expandable_segments"], "OPTION=VALUE"), (["--set", "no_such=1"], "no_such"),
    (["--set", "max_split_size_mb=1"], "max_split_size_mb"), (["--set", "backend=cudaMallocAsync"], "backend"),
    (["--capacity", "much"], "much"), (["--capacity", "0"], "--capacity"),
    (["--capacity", "24"], "--capacity"), (["--kv-growth", "chunked"], "chunked"),
    (["--kv-growth", "paged:8"], "KV"), (["--device", "7"], "7"), (["--device", "-1"], "--device")])
def test_what_cannot_be_done_is_refused_in_a_sentence(bursts: Path, arguments: list[str], named: str,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """A bad option, a device that is not there and a cache that is none: one line on stderr, exit code 2."""
    assert main(["whatif", str(bursts), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvobs: ")
    assert err.count("\n") == 1
    assert named in err
    assert "Error" not in err


@pytest.mark.parametrize("content", [None, b"", b"\x80\x04K\x01.", b"not a snapshot"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """A missing, empty or foreign file gives one sentence with its name."""
    path = tmp_path / "file.pickle"
    if content is not None:
        path.write_bytes(content)
    assert main(["whatif", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "file.pickle" in err


def test_the_command_is_one_of_kvobs(bursts: Path) -> None:
    """As a process it prints the document alone on stdout, and nothing on stderr."""
    ran = run_child([sys.executable, "-m", "kvobs", "whatif", bursts, "--set", "expandable_segments=True", "--json"])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["devices"][0]["after"]["peak_reserved_bytes"] == 140 * MIB


def test_a_device_that_had_nothing_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose only event is an OOM with nothing reserved and nothing left is compared: the OOM stays one."""
    (tmp_path / "made.json").write_text(json.dumps({"segments": [], "device_traces": [[
        {"action": "oom", "size": 512, "stream": 0, "device_free": 0, "time_us": 1, "frames": []}]]}))
    assert main(["whatif", str(tmp_path / "made.json"), "--json"]) == 0
    device, = json.loads(capsys.readouterr().out)["devices"]
    assert (device["before"]["ooms"], device["after"]["ooms"], device["recorded"]["ooms"]) == (1, 1, 1)
