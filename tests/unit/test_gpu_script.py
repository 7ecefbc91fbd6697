"""The script of tests/gpu, as far as a CPU can run it: judging, sanitising, comparing, and what it calls of torch."""

from __future__ import annotations

import argparse
import inspect
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator import core
from kvobs.allocator.readers import Unreadable, read
from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import OutOfMemory
from tests.gpu import _judge, _part, record
from tests.gpu._checks import agrees, check, compared, failed, ground_truth, points_read, said
from tests.gpu._device import environment_for, versions
from tests.gpu._sanitised import packed, sanitised

SECRET = "/home/somebody/project/secret_plan.py"
FRAMES = ((SECRET, 7, "answer"), ("/opt/venv/lib/torch/nn/modules/module.py", 1, "forward"))


def history(settings: Settings, steps: int = 30) -> RecordingAllocator:
    """A program that grows, frees and empties its cache, with paths in its stacks."""
    clock = itertools.count(1_700_000_000_000_000, 50)
    made = RecordingAllocator(settings, 4096 * MIB, now=lambda: next(clock), space=1 << 40)
    held: list[int] = []
    for step in range(steps):
        held.append(made.alloc((step % 7 + 1) * 900_000, stream=step % 2, frames=FRAMES))
        made.alloc(1000 + step, frames=FRAMES)
        if step % 3 == 2:
            made.free(held.pop(0))
        if step == steps // 2:
            made.empty_cache(FRAMES)
    return made


def counted(made: RecordingAllocator) -> dict[str, int]:
    """The twin's totals under torch's names, and what only a count of its history tells."""
    found, actions = made.stats(), [event["action"] for event in made.history]
    flat = {f"{name}_bytes.all.{when}": getattr(found, name if when == "current" else f"peak_{name}")
            for name in ("reserved", "allocated", "active") for when in ("current", "peak")}
    return flat | {"num_device_alloc": found.device_allocs, "num_ooms": found.ooms,
                   "allocation.all.allocated": actions.count("alloc")}


def texts(value: Any) -> Iterator[str]:
    """Every text in a document, keys too."""
    if isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in texts(part))
    elif isinstance(value, list | tuple):
        yield from (text for part in value for text in texts(part))
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("settings", [Settings(), Settings(expandable_segments=True)], ids=["default", "expandable"])
def test_a_complete_history_agrees_with_its_counters_in_both_engines(tmp_path: Path, settings: Settings) -> None:
    """Of a history from nothing every fact is reproduced, and every counter that was kept beside it agrees."""
    made = history(settings)
    made.dump(tmp_path / "snapshot.pickle")
    told, trace = _judge.judged(tmp_path / "snapshot.pickle", {"stats": counted(made)})
    assert not failed(told["checks"])
    for scores in told["scores"].values():
        assert all(score[fact][0] == score[fact][1] > 0 for score in scores for fact in ("addresses", "device_allocs"))
    available = {engine for engine in _judge.ENGINES if engine == "Python" or core.engine("auto") == engine}
    assert set(told["scores"]) == available
    assert trace


@pytest.mark.parametrize("key", ["reserved_bytes.all.current", "allocation.all.allocated", "num_device_alloc",
                                 "active_bytes.all.peak"])
def test_a_counter_that_disagrees_is_told(tmp_path: Path, key: str) -> None:
    """One counter that is off by one makes exactly one more comparison fail."""
    made = history(Settings())
    made.dump(tmp_path / "snapshot.pickle")
    stats = counted(made)
    told, _ = _judge.judged(tmp_path / "snapshot.pickle", {"stats": stats | {key: stats[key] + 1}})
    assert len(failed(told["checks"])) == 1


def test_an_error_is_judged_against_what_its_observer_saw(tmp_path: Path) -> None:
    """Holes that are enough in sum make FRAGMENTED, a request beyond everything CAPACITY; lies about them are told."""
    made = RecordingAllocator(Settings(), 40 * MIB, space=1 << 40)
    blocks = [made.alloc(3 * MIB, frames=FRAMES) for _ in range(12)]
    for block in blocks[::2]:
        made.free(block)
    failures = []
    for label, size, expected in (("fragments", 16 * MIB, "FRAGMENTED"), ("bytes", 400 * MIB, "CAPACITY")):
        before = made.stats()
        with pytest.raises(OutOfMemory):
            made.alloc(size, frames=FRAMES)
        seen = {"requested": size, "allowed": 40 * MIB, "device_free": 0, "reserved": before.reserved,
                "allocated": before.allocated, "active": before.active}
        asked, used, unused = (f"{amount / MIB:.2f} MiB" for amount in (
            size, before.allocated, before.reserved - before.allocated))
        message = (f"Tried to allocate {asked}. Of the allocated memory {used} is allocated by PyTorch, and {unused} "
                   "is reserved by PyTorch but unallocated.")
        failures.append({"label": label, "expected": expected, "ran_out": True, "failures": [seen],
                         "said": said(message)})
    made.dump(tmp_path / "snapshot.pickle")
    told, _ = _judge.judged(tmp_path / "snapshot.pickle", {"failures": failures})
    assert not failed(told["checks"])
    assert [oom["verdict"] for oom in told["ooms"]] == ["FRAGMENTED", "CAPACITY"]
    assert [oom["truth"] for oom in told["ooms"]] == ["ENOUGH IN SUM", "CAPACITY"]
    failures[0]["expected"], failures[1]["failures"][0]["reserved"] = "CAPACITY", 900 * MIB
    told, _ = _judge.judged(tmp_path / "snapshot.pickle", {"failures": failures})
    assert failed(told["checks"]) == ["fragments: the verdict is what was arranged",
                                      "bytes: the verdict is what the bytes say", "bytes: reserved at the error"]


def test_what_is_published_holds_no_path_and_replays_as_before(tmp_path: Path) -> None:
    """Of a sanitised trace no text is left but words of the format and function names, and every fact is reproduced."""
    made = history(Settings(expandable_segments=True))
    document = made.snapshot_document()
    document["device_traces"][0][3]["user_metadata"] = SECRET
    document["external_annotations"] = [{"name": SECRET, "stage": "START", "device": 0, "time_us": 5}]
    data, events, whole = packed(document)
    found = set(texts(sanitised(document)))
    (tmp_path / "trace.pickle.gz").write_bytes(data)
    assert {text for text in found if "/" in text or "." in text} == set()
    assert {"answer", "forward"} <= found
    assert (events, whole) == (len(made.history), True)
    scores = _judge.rescored(tmp_path / "trace.pickle.gz")["scores"]
    assert scores[0]["addresses"][0] == scores[0]["addresses"][1] == len(
        [event for event in made.history if event["action"] == "alloc"])
    assert min(event["time_us"] for event in sanitised(document)["device_traces"][0]) == 0


def test_a_long_history_is_cut_at_its_beginning_and_still_replays(tmp_path: Path) -> None:
    """A trace that must be smaller keeps its last events, says so, and its facts are reproduced from its last state."""
    made = history(Settings(), steps=300)
    limit = len(packed(made.snapshot_document())[0]) * 2 // 3
    data, events, whole = packed(made.snapshot_document(), limit)
    (tmp_path / "trace.pickle.gz").write_bytes(data)
    kept = read(tmp_path / "trace.pickle.gz").devices[0].events
    assert len(data) <= limit
    assert 0 < events < len(made.history)
    assert not whole
    assert list(kept.size) == [event["size"] for event in list(made.history)[-events:]]
    score = _judge.rescored(tmp_path / "trace.pickle.gz")["scores"][0]
    assert score["usable"]
    assert score["addresses"][0] == score["addresses"][1] > 0
    assert packed(made.snapshot_document(), 10) == (b"", 0, False)


def test_pools_are_told_by_the_key_that_events_have() -> None:
    """Events that name their pool are counted under the name of the key, whichever of its names it has."""
    document: dict[str, Any] = history(Settings(), 3).snapshot_document()
    assert _judge.pools(document)["events_naming_a_pool"] == {}
    for event in document["device_traces"][0][:4]:
        event["pool_id"] = (0, 3)
    told = _judge.pools(document)
    assert told["events_naming_a_pool"] == {"pool_id": 4}
    assert told["pools_of_events"] == {"(0, 3)": 4}


def test_a_file_that_kvobs_refuses_is_judged_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is one failed comparison; the rest is judged from the same document, written in another way."""
    made = history(Settings(), 5)
    made.dump(tmp_path / "snapshot.pickle")

    def refusing(path: Path) -> Any:
        if path.suffix == ".pickle":
            raise Unreadable(f"{path} cannot be read: whatever.")
        return read(path)

    monkeypatch.setattr(_judge, "read", refusing)
    told, _ = _judge.judged(tmp_path / "snapshot.pickle", {"stats": counted(made)})
    assert failed(told["checks"]) == ["kvobs reads the file as torch wrote it"]
    assert all(score["addresses"][0] == score["addresses"][1] > 0 for scores in told["scores"].values()
               for score in scores)
    assert str(tmp_path) not in str(told)


def test_a_snapshot_is_read_without_loading_code(tmp_path: Path) -> None:
    """A file that names a function is refused, also by the part of the script that looks for pools."""
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps({"segments": [print], "device_traces": []}))
    with pytest.raises(pickle.UnpicklingError):
        _judge.judged(tmp_path / "snapshot.pickle", {})


def test_amounts_are_read_from_torchs_message() -> None:
    """Each amount of an out-of-memory message is found by the words around it, in the unit that torch chose."""
    found = said("CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a total capacity of 139.81 GiB of which "
                 "137.97 GiB is free. 1.25 GiB allowed; Of the allocated memory 300.12 MiB is allocated by PyTorch, "
                 "with 2.00 MiB allocated in private pools, and 512 bytes is reserved by PyTorch but unallocated.")
    assert found == {"requested": (16.0, MIB), "device_free": (137.97, 1 << 30), "allowed": (1.25, 1 << 30),
                     "allocated": (300.12, MIB), "unallocated": (512.0, 1)}
    assert agrees((300.12, MIB), int(300.1249 * MIB))
    assert not agrees((300.12, MIB), int(300.14 * MIB))
    assert not agrees(None, 0)


def test_torchs_message_may_tell_the_segment_in_place_of_the_request(tmp_path: Path) -> None:
    """CUDA's message names what was asked of the device: 20 MiB for a request of 3 MiB agree, 21 MiB do not."""
    made = RecordingAllocator(Settings(), 20 * MIB, space=1 << 40)
    made.alloc(18 * MIB)
    with pytest.raises(OutOfMemory):
        made.alloc(3 * MIB)
    made.dump(tmp_path / "snapshot.pickle")
    seen = {"requested": 20 * MIB, "allowed": 20 * MIB, "device_free": 0, "reserved": 18 * MIB, "allocated": 18 * MIB,
            "active": 18 * MIB}
    for amount, wrong in (("3.00", []), ("20.00", []), ("21.00", ["x: torch's message says the same of requested"])):
        failure = {"label": "x", "expected": "CAPACITY", "ran_out": True, "failures": [seen],
                   "said": said(f"Tried to allocate {amount} MiB.")}
        told, _ = _judge.judged(tmp_path / "snapshot.pickle", {"failures": [failure]})
        assert failed(told["checks"]) == wrong


@pytest.mark.parametrize(("rounded", "device_free", "truth"), [
    (30, 50, "ENOUGH IN SUM"), (31, 50, None), (40, 50, None), (41, 50, "CAPACITY"), (31, 0, "CAPACITY")])
def test_bytes_decide_what_a_verdict_must_say(rounded: int, device_free: int, truth: str | None) -> None:
    """30 bytes are cached and 10 more allowed: beyond their sum it is capacity, up to the cached ones it is not."""
    assert ground_truth(rounded, allowed=100, reserved=90, allocated=60, device_free=device_free) == truth


def points(expandable: bool) -> dict[str, list[tuple[int, dict[str, str], float]]]:
    """What a store would hold after two polls, of which the first is out of date."""
    device = {"device": "cuda:0"}
    one: dict[str, list[tuple[dict[str, str], float]]] = {
        "kvobs.allocator.usage": [(device | {"state": "allocated"}, 60), (device | {"state": "unused"}, 30)],
        "kvobs.allocator.requested": [(device, 55)], "kvobs.allocator.active": [(device, 70)],
        "kvobs.allocator.inactive_split": [] if expandable else [(device, 12)],
        "kvobs.allocator.segments": [(device, 3)], "kvobs.allocator.retries": [(device, 1)],
        "kvobs.allocator.out_of_memory": [(device, 2)],
        "kvobs.allocator.device.operations": [(device | {"operation": "allocate"}, 5),
                                              (device | {"operation": "free"}, 2)]}
    return {metric: [(1, attributes, value - 1) for attributes, value in told] +
            [(2, attributes, value) for attributes, value in told] for metric, told in one.items()}


STATS = {"reserved_bytes.all.current": 90, "allocated_bytes.all.current": 60, "requested_bytes.all.current": 55,
         "active_bytes.all.current": 70, "inactive_split_bytes.all.current": 12, "segment.all.current": 3,
         "num_alloc_retries": 1, "num_ooms": 2, "num_device_alloc": 5, "num_device_free": 2}


@pytest.mark.parametrize("expandable", [False, True])
def test_metrics_are_compared_with_statistics(expandable: bool) -> None:
    """Equal values hold, the bytes of split blocks must be absent with expandable segments, and each change is told."""
    found = points_read(points(expandable))
    assert not failed(compared(found, STATS, "cuda:0", expandable))
    for key in STATS:
        changed = compared(found, STATS | {key: STATS[key] + 1}, "cuda:0", False)
        assert len(failed(changed)) >= 1
    assert len(failed(compared(found, STATS, "cuda:1", False))) == len(compared(found, STATS, "cuda:0", False))
    assert failed(compared(points_read(points(True)), STATS, "cuda:0", False)) == [
        "inactive split (absent with expandable segments)"]


def test_expandable_segments_that_are_not_counted_are_absent() -> None:
    """Where every segment is expandable, torch counts none, and a zero of kvobs would be wrong."""
    none, some = STATS | {"segment.all.current": 0}, points_read(points(True))
    without = {key: value for key, value in some.items() if key[0] != "kvobs.allocator.segments"}
    zero = some | {("kvobs.allocator.segments", (("device", "cuda:0"),)): 0.0}
    assert not failed(compared(without, none, "cuda:0", True))
    assert len(failed(compared(zero, none, "cuda:0", True))) == 1


def test_beyond_the_total_no_part_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the six minutes are over, a part is told as not begun, and no process is started for it."""
    monkeypatch.setattr(record, "TOTAL_SECONDS", record.LEAST_SECONDS - 1)
    monkeypatch.setattr(record.Script, "_process", lambda *_, **__: pytest.fail("A process was started."))
    script = record.Script(argparse.Namespace(kind="cuda", patience=1.0))
    told = script._part(_part.PARTS[0], tmp_path, observed=True)
    assert told == {"failed": "the time was over before it began"}


def test_a_part_has_its_own_settings_and_none_of_kvobs() -> None:
    """A child's allocator settings replace those of the shell under both names; kvobs's do not reach it."""
    shell = {"PATH": "/bin", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "KVOBS_DEEP": "1"}
    assert environment_for("", shell).keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "KVOBS_DEEP"} == set()
    made = environment_for(_part.EXPANDABLE, shell)
    assert made["PYTORCH_ALLOC_CONF"] == made["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert made["PATH"] == "/bin"


def test_a_part_is_told_in_words() -> None:
    """A part's lines say its scores, each verdict, which comparisons failed, and why it was skipped."""
    told = {"checks": [check("a", 1, 1), check("b", 1, 2)], "judged": {
        "scores": {"C++": [{"addresses": [9, 10], "device_allocs": [2, 2], "device_frees": [0, 0], "events": 30,
                            "reason": "one differs"}]},
        "ooms": [{"label": "bytes", "verdict": "CAPACITY", "truth": "CAPACITY", "sentence": "No."}]}}
    assert record.lines("oom", told) == [
        "oom, C++: addresses 9/10, device allocs 2/2, device frees 0/0 of 30 events (one differs)",
        "oom, bytes: CAPACITY (by bytes: CAPACITY). No.", "oom: 1 of 2 checks hold; not: b"]
    assert record.lines("x", {"skipped": "No graphs."}) == ["x: skipped: No graphs."]


def test_a_part_that_does_not_end_is_stopped_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its deadline a part's process is ended, and its figures say so."""
    pytest.importorskip("torch", reason="torch is not installed: without it a part fails before any deadline.")
    monkeypatch.setattr(record, "TOTAL_SECONDS", 1e6)
    asked = argparse.Namespace(kind="cuda", out=tmp_path, model=None, tiny=True, only=None, keep=False, patience=1e-4)
    (tmp_path / "scratch").mkdir()
    told = record.Script(asked)._part(_part.BY_NAME["streams"], tmp_path / "scratch", observed=True)
    assert told["failed"] == "it did not end within 0 s"


def _calls(torch: Any) -> list[tuple[Callable[..., object], tuple[object, ...], dict[str, object]]]:
    cuda, memory = torch.cuda, torch.cuda.memory
    return [
        (memory._record_memory_history, (), {"enabled": "all", "context": "alloc", "stacks": "python",
                                             "max_entries": 5}),
        (memory._record_memory_history, (), {"enabled": None}), (memory._snapshot, (), {}),
        (memory.get_allocator_backend, (), {}), (cuda.memory_stats, (0,), {}), (cuda.mem_get_info, (0,), {}),
        (cuda.set_per_process_memory_fraction, (0.5, 0), {}), (cuda.empty_cache, (), {}), (cuda.synchronize, (), {}),
        (cuda.get_device_properties, (0,), {}), (cuda.is_available, (), {}), (cuda.device_count, (), {}),
        (cuda.init, (), {}), (cuda._sleep, (1,), {}), (cuda.stream, (None,), {}), (cuda.current_stream, (), {}),
        (cuda.graph.__init__, (None, None), {"pool": None}), (cuda.MemPool.__init__, (None,), {}),
        (cuda.use_mem_pool, (None,), {})]


@pytest.mark.torch
def test_what_is_called_of_torch_takes_those_arguments() -> None:
    """Every function of torch.cuda that the script calls exists here, with the parameters that it is given."""
    torch = pytest.importorskip("torch")
    for function, arguments, named in _calls(torch):
        inspect.signature(function).bind(*arguments, **named)
    for name in ("Stream", "CUDAGraph"):
        assert hasattr(torch.cuda, name)
    assert {"replay", "pool"} <= set(dir(torch.cuda.CUDAGraph))
    assert {"wait_stream"} <= set(dir(torch.cuda.Stream))
    assert issubclass(torch.OutOfMemoryError, RuntimeError)


def test_versions_that_are_not_known_are_absent() -> None:
    """A distribution that is not installed has no version rather than a made-up one."""
    from importlib import metadata

    def named(name: str) -> str:
        if name != "torch":
            raise metadata.PackageNotFoundError(name)
        return "2.13.0"

    assert versions(named) == {"torch": "2.13.0", "transformers": None, "kvobs": None, "nvidia-ml-py": None}
