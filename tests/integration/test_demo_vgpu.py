"""The demo on two virtual GPUs, with a tiny random model and in a process of its own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")

from kvobs.lab.demo import _report, _script
from kvobs.store import StoreReader
from tests.integration.test_demo import BYTES_PER_TOKEN, LAYERS, make_tiny
from tests.support import ROOT, child_environment, run_child
from tests.vgpu import needs_vgpu

pytestmark = [pytest.mark.torch, needs_vgpu()]
TURNS = 4
CODE = """
import json, sys
from pathlib import Path
from kvobs.lab.demo import run

code = run(int(sys.argv[2]), as_json=sys.argv[3] == "json", model=Path(sys.argv[1]), device=sys.argv[4])
if code == 0 and sys.argv[4] == "vgpu":
    import torch
    print("copies " + json.dumps([[*pair, *found] for pair, found in torch.vgpu.copies().items()]), file=sys.stderr)
sys.exit(code)
"""


class Ran:
    """What a run printed, and where its store is."""

    def __init__(self, folder: Path, model: Path, form: str, device: str) -> None:
        self.store = folder / "store"
        done = run_child([sys.executable, "-c", CODE, model, str(TURNS), form, device], cwd=ROOT, timeout=600,
                         env=child_environment(KVOBS_STORE=str(self.store), KVOBS_PROMETHEUS="127.0.0.1:0",
                                               KVOBS_OVERHEAD_PERCENT="100", HF_HUB_OFFLINE="1"))
        assert done.returncode == 0, done.stderr
        self.out, self.err = done.stdout, done.stderr

    @property
    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-chat", context=4096)


@pytest.fixture(scope="module")
def ran(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("vgpu"), tiny, "json", "vgpu")


def test_it_says_which_devices_ran(ran: Ran) -> None:
    """The first sentence names both devices, and says whose compute and whose memory it is."""
    said = [line for line in ran.err.splitlines() if line.startswith("Device: ")]
    assert said == ["Device: vgpu:0 and vgpu:1 (1 GiB and 1 GiB): compute is the CPU's, memory is the virtual GPU's, "
                    "whose allocator behaves as CUDA's."]


def test_the_main_conversation_moves_half_way(ran: Ran) -> None:
    """It alone changes device, after half of its turns, with K and V of each layer and all the tokens it had."""
    devices: dict[str, list[str]] = {}
    for line in ran.told:
        devices.setdefault(line["conversation"], []).append(line["device"])
    assert devices == {"garden": ["vgpu:0", "vgpu:0", "vgpu:1", "vgpu:1"], "travel": ["vgpu:0"] * 2,
                       "letter": ["vgpu:0"] * 2}
    garden = [line for line in ran.told if line["conversation"] == _script.MAIN]
    assert [line["migrations"] for line in garden] == [0, 0, 2 * LAYERS, 0]
    assert [line["bytes_migrated"] for line in garden] == [0, 0, garden[1]["kv_bytes"], 0]
    assert garden[1]["kv_bytes"] == BYTES_PER_TOKEN * (garden[1]["prompt_tokens"] + garden[1]["new_tokens"] - 1)
    assert not any(line["migrations"] for line in ran.told if line["conversation"] != _script.MAIN)


def test_the_devices_counted_the_same_copies(ran: Ran) -> None:
    """The virtual GPU's own count of copies from vgpu:0 to vgpu:1 is what the demo told, and nothing came back."""
    copies = {(src, dst): (count, size) for src, dst, count, size in json.loads(
        re.findall(r"^copies (.*)$", ran.err, re.MULTILINE)[0])}
    moved = [line for line in ran.told if line["migrations"]]
    assert copies["vgpu:0", "vgpu:1"] == (moved[0]["migrations"], moved[0]["bytes_migrated"])
    assert ("vgpu:1", "vgpu:0") not in copies


def test_the_store_holds_what_was_told(ran: Ran) -> None:
    """Turns and migrations of the store are those of the lines."""
    reader = StoreReader(ran.store)
    assert [(stored.record.session, stored.record.turn, stored.record.origin.device, stored.record.bytes_copied)
            for stored in reader.turns()] == [
        (line["session"], line["turn"], line["device"], line["bytes_copied"]) for line in ran.told]
    moves = [stored.record for stored in reader.migrations()]
    assert {(move.src, move.dst) for move in moves} == {("vgpu:0", "vgpu:1")}
    assert sum(move.buffers for move in moves) == sum(line["migrations"] for line in ran.told)
    assert sum(move.bytes for move in moves) == sum(line["bytes_migrated"] for line in ran.told)


def test_the_allocator_figures_are_those_of_the_metrics(ran: Ran) -> None:
    """Reserved, allocated and largest free bytes of each line were recorded by source torch for that device."""
    points: dict[tuple[str, str], set[int]] = {}
    reader = StoreReader(ran.store)
    for point in reader.points("kvobs.allocator.usage"):
        points.setdefault((point.attributes["device"], point.attributes["state"]), set()).add(int(point.value))
    for point in reader.points("kvobs.window.largest_free"):
        points.setdefault((point.attributes["device"], "largest"), set()).add(int(point.value))
    for line in ran.told:
        held = line["allocator"]
        assert held["allocated_bytes"] in points[line["device"], "allocated"]
        assert held["reserved_bytes"] - held["allocated_bytes"] in points[line["device"], "unused"]
        assert held["largest_free_bytes"] in points[line["device"], "largest"]
        assert held["article_rate"] == pytest.approx(1 - held["largest_free_bytes"] / held["allocated_bytes"])
        assert held["unused_share"] == pytest.approx(1 - held["allocated_bytes"] / held["reserved_bytes"])
        assert 0 <= held["gmlake"] < 1


def test_a_roomy_device_serves_the_next_step(ran: Ran) -> None:
    """With nearly all of 1 GiB free, the next step of every conversation is served or grows, and is estimated."""
    assert {line["next_step"]["verdict"] for line in ran.told} <= {"SERVED", "GROW"}
    assert all(line["next_step"]["estimated"] for line in ran.told)


def test_the_same_words_as_on_the_cpu(ran: Ran, tiny: Path, tmp_path: Path) -> None:
    """In float32 the device changes no reply, nor does the move from one to the other."""
    assert [line["text"] for line in Ran(tmp_path, tiny, "json", "cpu").told] == [line["text"] for line in ran.told]


def test_both_tables_fit_eighty_columns(ran: Ran) -> None:
    """No row of the tables is wider than 80 characters, also with the widest figures of a long run."""
    from rich.console import Console

    wide = [line | {"turn": 64, "prompt_tokens": 8123, "kv_bytes": 190 << 20, "reallocations": 5760,
                    "bytes_copied": 17 << 30, "bytes_written": 3 << 20, "bytes_migrated": 188 << 20, "ttft_s": 9.999,
                    "tpot_s": 0.9999, "next_step": {"verdict": "FRAGMENTED"}} for line in ran.told]
    for table in _report.tables_of(wide):
        assert Console(width=200).measure(table).maximum <= 80


def test_the_terminal_says_what_moved(tiny: Path, tmp_path: Path) -> None:
    """After the tables one line has kvobs's count of the move beside the device's own, and both are equal."""
    ran = Ran(tmp_path, tiny, "text", "vgpu")
    assert ran.out.splitlines()[0].startswith("Device: vgpu:0 and vgpu:1 ")
    found = re.search(r"^Migration: kvobs saw (\d+) buffers and ([\d,]+) bytes go from vgpu:0 to vgpu:1; the virtual "
                      r"GPU itself counted (\d+) copies and ([\d,]+) bytes\.$", ran.out, re.MULTILINE)
    assert found is not None
    assert found[1] == found[3] == str(2 * LAYERS)
    assert found[2] == found[4]
