"""What cannot be set up is one sentence, and torch has no accelerator then; settings that come and go."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import run_python
from tests.vgpu import needs_vgpu, on_vgpu

pytestmark = needs_vgpu()
REFUSED = """
import json, sys
import kvobs.virtual
told = []
for devices, settings, latency in json.loads(sys.argv[1]):
    try:
        kvobs.virtual.setup(devices, settings, latency)
    except kvobs.virtual.Unavailable as error:
        told.append(str(error))
    else:
        told.append("")
torch = sys.modules.get("torch")
accelerator = None if torch is None else torch.accelerator.current_accelerator()
settings = "" if torch is None else torch._C._accelerator_getAllocatorSettings()
print(json.dumps([told, accelerator and str(accelerator), hasattr(torch, "vgpu"), settings]))
"""
# What is wrong, and what the sentence names.
WRONG: list[tuple[list[Any], str]] = [
    ([["1KiB"], "", None], "'1KiB' is no size"), ([["much"], "", None], "'much' is no size"),
    ([[], "", None], "0 virtual devices"), ([["1GiB"] * 17, "", None], "17 virtual devices"),
    ([["2TiB"], "", None], "'2TiB' is no size"), ([[-1], "", None], "-1 is no size"), ([[1.5], "", None], "1.5 is no"),
    ([[None], "", None], "None is no size"), (["24GiB", "", None], "'24GiB' is no list"),
    ([["1GiB"], "", "H900"], "no latency profile 'H900'"), ([["1GiB"], "expandable_segment:True", None], "no option"),
    ([["1GiB"], "max_split_size_mb:3", None], "too small"), ([["1GiB"], "fast", None], "is no string"),
    ([["1GiB"], "roundup_power2_divisions:3", None], "power of 2"),
    ([["1GiB"], "large_segment_size_mb:40,garbage_collection_threshold:7", None], "invalid"),
    ([["1GiB"], "per_process_memory_fraction:1.5", None], "per_process_memory_fraction"),
    ([["1GiB"], "max_split_size_mb:99999999999999999999", None], "refuses"),
]


def refused(code: str, *wanted: list[Any], **settings: str) -> tuple[list[str], Any]:
    """The sentences, and what torch knows then: its accelerator, whether there is ``torch.vgpu``, its settings."""
    done = run_python(code, json.dumps(wanted or [[["1GiB"], "", None]]), **settings)
    assert done.returncode == 0, done.stderr
    told, *left = json.loads(done.stdout.splitlines()[-1])
    for sentence in told:
        assert sentence.endswith("."), sentence
        assert "\n" not in sentence
    return told, left


def test_wrong_arguments_are_said_and_leave_nothing() -> None:
    """Each is named in a sentence; torch has no accelerator afterwards, and the settings it had."""
    told, left = refused(REFUSED, *(arguments for arguments, _ in WRONG))
    for (_, named), sentence in zip(WRONG, told, strict=True):
        assert named in sentence
    assert left[:2] == [None, False]
    assert left[2] in ("", "large_segment_size_mb:20")  # said where a refused text had changed it


@pytest.mark.parametrize(("before", "settings", "named"), [
    ("import sys; sys.modules['torch'] = None", {}, "needs torch"),
    ("", {"KVOBS_NATIVE": "off"}, "switched off"),
    ("", {"PATH": ""}, "C++ compiler"),
    ("import torch; torch.utils.rename_privateuse1_backend('mine')", {}, "mine"),
    ("import resource, torch; resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))", {}, "ulimit -v"),
], ids=["torch", "native", "compiler", "accelerator", "addresses"])
def test_what_a_virtual_gpu_needs_is_named(before: str, settings: dict[str, str], named: str) -> None:
    """Without torch, compiled code, a compiler, a place in torch or addresses, the sentence says which of them."""
    (sentence,), left = refused(before + REFUSED, **settings)
    assert named in sentence
    assert left[:2] == ["mine" if named == "mine" else None, False]


def twice() -> object:
    """Set up again: the same, with other settings, with another device, with another profile."""
    import torch

    import kvobs.virtual

    def fails(*arguments: object) -> str:
        try:
            kvobs.virtual.setup(*arguments)  # type: ignore[arg-type]
        except kvobs.virtual.Unavailable as error:
            return str(error)
        return ""

    kept = torch.empty(100, device="vgpu")
    told = [fails(["1GiB"]), fails(["1GiB"], "max_split_size_mb:30"), fails(["2GiB"]), fails(["1GiB", "1GiB"]),
            fails(["1GiB"], "nothing:1"), fails(["1GiB"], "per_process_memory_fraction:0.25"),
            fails(["1GiB"], "", "A100")]
    limited = torch.vgpu.get_per_process_memory_fraction()
    try:
        torch.empty(1 << 28, dtype=torch.uint8, device="vgpu")
    except torch.OutOfMemoryError:
        limited = -limited
    return {"told": told, "limited": limited, "profile": torch.vgpu.latency_profile(), "kept": kept.numel(),
            "settings": torch.vgpu.memory._snapshot()["allocator_settings"]["max_split_size"]}


def test_a_second_setup_is_the_same_or_refused() -> None:
    """The same devices again change settings, limits and the profile; others are refused; what is allocated stays."""
    found = on_vgpu(twice, devices=("1GiB",))
    same, changed, larger, more, unknown, limited, profile = found["told"]
    assert (same, changed, limited, profile) == ("", "", "", "")
    assert "start a new process" in larger
    assert "start a new process" in more
    assert "'nothing'" in unknown
    assert (found["limited"], found["profile"], found["kept"]) == (-0.25, "A100", 100)
    assert found["settings"] == 30 << 20


def lasting() -> object:
    """What is in effect after a change was made and undone, and after one was refused."""
    import torch

    from kvobs.virtual import Unavailable, change_settings
    from kvobs.virtual._settings import in_effect

    told = []
    for change in ("expandable_segments:True", "large_segment_size_mb:40",
                   "large_segment_size_mb:32,max_split_size_mb:64",
                   "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:True",
                   "garbage_collection_threshold:0.5,max_non_split_rounding_mb:50"):
        before = in_effect()
        restoring = change_settings(change)
        changed = in_effect() != before
        torch._C._accelerator_setAllocatorSettings(restoring)
        told.append([changed, in_effect() == before])
    before = in_effect()
    try:
        change_settings("expandable_segments:True,large_segment_size_mb:64,garbage_collection_threshold:7")
    except Unavailable:
        told.append([True, in_effect() == before])
    return told


def test_a_change_of_settings_is_undone_whole() -> None:
    """The text that ``change_settings`` returns restores each option, also those that torch lets outlive a text without
    them; a refused change, of which torch has taken a part, changes nothing.
    """
    assert on_vgpu(lasting, devices=("1GiB",)) == [[True, True]] * 6


def test_the_environment_gives_the_settings() -> None:
    """``PYTORCH_ALLOC_CONF`` counts as on CUDA, the memory fraction too, and options that only CUDA has do no harm."""
    code = """
import json, torch, kvobs.virtual
kvobs.virtual.setup(["1GiB"])
kvobs.virtual.change_settings("max_split_size_mb:50")
told = torch.vgpu.memory._snapshot()["allocator_settings"]
print(json.dumps([torch.vgpu.get_per_process_memory_fraction(), told["expandable_segments"], told["max_split_size"]]))
"""
    done = run_python(code, PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.5,expandable_segments:True,"
                                               "pinned_num_register_threads:4,release_lock_on_cudamalloc:True")
    assert done.stdout.splitlines() == [f"[0.5, true, {50 << 20}]"], done.stderr


def no_room(expandable: bool) -> object:
    """The host has no addresses for two attempts, the second after all was released; then it has."""
    from array import array

    import torch

    from kvobs.virtual import _setup

    library = _setup._library_of_process
    assert library is not None
    nowhere = array("Q", (1 << 62, 1 << 62))
    library.check(library.plan(0, nowhere.buffer_info()[0], len(nowhere)))
    told = []
    for size in (200 << 20, 1 << 20, 2 << 30):
        try:
            torch.empty(size, dtype=torch.uint8, device="vgpu")
            told.append(["", ""])
        except RuntimeError as error:
            told.append([type(error).__name__, str(error)])
    return {"told": told, "ooms": torch.vgpu.memory_stats()["num_ooms"], "expandable": expandable}


@pytest.mark.parametrize("expandable", [False, True])
def test_a_host_without_memory_is_no_full_device(expandable: bool) -> None:
    """Where the host gives none, the error says so, is no OutOfMemoryError and not counted as one; requests go on, and
    the next that the device has no memory for is one.
    """
    found = on_vgpu(no_room, devices=("1GiB",), settings=f"expandable_segments:{expandable}", expandable=expandable)
    (name, sentence), fits, too_large = found["told"]
    assert name == "RuntimeError"
    assert sentence.startswith("The host could not map 200.00 MiB for the virtual device vgpu:0")
    assert fits == ["", ""]
    assert too_large[0] == "OutOfMemoryError"
    assert found["ooms"] == 1
