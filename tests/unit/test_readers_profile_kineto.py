"""Kineto traces: against plain second readings, torch's own exporter, and real files of the past."""

from __future__ import annotations

import gzip
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.allocator.calls import summary
from kvobs.allocator.readers import _profile_json
from kvobs.allocator.recording import UNKNOWN, Recording
from tests.profiles import call_event, memory_event, trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "profiler"
OTHERS = st.sampled_from([
    {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 7, "tid": 7, "ts": 1, "dur": 2},
    {"ph": "M", "name": "process_name", "ts": 0, "pid": "Spans", "args": {"name": "[memory] cudaMalloc"}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": 1, "dur": 2},
    {"ph": "s", "id": 3, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": 1}])
MEMORY = st.builds(memory_event, st.integers(0, 1 << 50), st.integers(1, (1 << 63) - 1),
                   st.integers(-(1 << 40), 1 << 40).filter(bool), st.integers(0, 1 << 40), st.integers(0, 1 << 40),
                   st.sampled_from([0, 1]), st.sampled_from([0, 1]))
CALLS = st.builds(call_event, st.integers(0, 1 << 50), st.integers(0, 1 << 30),
                  st.sampled_from(["cudaMalloc", "cudaFree", "cuMemMap", "hipMalloc"]))


def read(document: Any) -> Recording:
    return _profile_json.parse(json.dumps(document).encode(), "t.json")


@given(st.lists(MEMORY | CALLS | OTHERS, max_size=40), st.sampled_from([None, 0, 1_790_857_026_000_000_000]))
def test_events_are_those_of_a_plain_reading(events: list[dict[str, Any]], base: int | None) -> None:
    """Calls and usage per device are what a plain walk over the parsed JSON finds, whatever lies between them."""
    wanted = [event for event in events if event["name"] == "[memory]"]
    called = [event for event in events if event["name"] in {"cudaMalloc", "cudaFree", "cuMemMap", "hipMalloc"}]
    if not wanted and not called:
        with pytest.raises(ValueError, match="neither"):
            read(trace(events, base))
        return
    recording = read(trace(events, base))
    assert sorted(zip(recording.calls.start_ns, recording.calls.duration_ns, recording.calls.name, strict=True)) == \
        sorted(((base or 0) + event["ts"] * 1000, event["dur"] * 1000, event["name"]) for event in called)
    devices = {(event["args"]["Device Type"], event["args"]["Device Id"]) for event in wanted}
    assert {usage.device for usage in recording.usage} == {f"{'cuda' if kind else 'cpu'}:{index}"
                                                           for kind, index in devices}
    for usage in recording.usage:
        of = sorted((event for event in wanted
                     if f"{'cuda' if event['args']['Device Type'] else 'cpu'}:{event['args']['Device Id']}" ==
                     usage.device), key=lambda event: event["ts"])
        assert list(usage.time_us) == [(base or 0) // 1000 + event["ts"] for event in of]
        assert list(usage.allocated) == [event["args"]["Total Allocated"] for event in of]
        assert list(usage.reserved) == [event["args"]["Total Reserved"] if usage.device.startswith("cuda") else UNKNOWN
                                        for event in of]


def test_memory_events_are_no_history() -> None:
    """Without segments there is nothing to replay: no device claims that nothing was reserved, and a note says why."""
    recording = read(trace([memory_event(1, 4096, 512, 512, 1024)]))
    assert recording.devices == ()
    assert any("not replayed" in note for note in recording.notes)


def test_totals_of_old_traces_are_absent_not_zero() -> None:
    """Where a trace does not tell the totals, as in 2021, they are unknown, and a sentence says so."""
    old = memory_event(1, 4096, 512, 0, 0)
    del old["args"]["Total Allocated"], old["args"]["Total Reserved"]
    recording = read(trace([old]))
    assert list(recording.usage[0].allocated) == [UNKNOWN]
    assert list(recording.usage[0].reserved) == [UNKNOWN]
    assert any("did not record all totals" in note for note in recording.notes)


def test_a_total_that_alone_is_missing_is_told() -> None:
    """Of one event the bytes reserved are not told: they are unknown, the others are as written, and a note says so."""
    lacks = memory_event(2, 4096, 512, 1024, 0)
    del lacks["args"]["Total Reserved"]
    recording = read(trace([memory_event(1, 4096, 512, 512, 2048), lacks]))
    assert (list(recording.usage[0].allocated), list(recording.usage[0].reserved)) == ([512, 1024], [2048, UNKNOWN])
    assert any("did not record all totals of cuda:0" in note for note in recording.notes)


def test_calls_of_other_kinds_are_no_memory_events() -> None:
    """A kernel launch or an allocation on the host that makes no sense is not counted as an event about memory."""
    others = [{"name": name, "ph": "X", "ts": "now"} for name in ("cudaLaunchKernel", "cudaMallocHost", "cuMemcpy")]
    recording = read(trace([call_event(1, 2, "cudaMalloc_v3020"), *others]))
    assert recording.calls.name == ("cudaMalloc",)
    assert recording.notes == ()


def test_out_of_memory_is_told() -> None:
    """A request that failed is named with its size, together with what a trace cannot tell."""
    failed = memory_event(2, 0, 1 << 30, 512, 1024) | {"name": "[OutOfMemory]"}
    del failed["args"]["Addr"]
    recording = read(trace([memory_event(1, 4096, 512, 512, 1024), failed]))
    assert any("cuda:0 ran out of memory 1 times" in note and str(1 << 30) in note for note in recording.notes)
    assert len(recording.usage[0].time_us) == 1


def test_microseconds_become_exact_nanoseconds() -> None:
    """Whole microseconds keep every digit, and three decimals become ns, on top of the trace's base time."""
    base = 1_790_857_026_000_000_000
    recording = read(trace([call_event(5_173_182_776_412.735, 7.15, "cudaMalloc"),
                            call_event(1_695_835_572_936_227, 0.001, "cudaFree")], base))
    assert list(recording.calls.start_ns) == [base + 5_173_182_776_412_735, base + 1_695_835_572_936_227_000]
    assert list(recording.calls.duration_ns) == [7_150, 1]


def test_a_slow_first_call_is_flagged() -> None:
    """A first call much longer than most is named as the creation of the context; it stays among the calls."""
    calls = [call_event(index, 400_000 if index == 0 else 300, "cudaMalloc") for index in range(20)]
    recording = read(trace(calls))
    assert any("400.0 ms" in note and "context" in note for note in recording.notes)
    assert summary(recording.calls)[0].first_ns == 400_000_000
    assert not any("context" in note for note in read(trace(calls[1:])).notes)


def test_events_that_make_no_sense_are_counted() -> None:
    """Events about memory without what they need, or with impossible values, are left out and counted in a note."""
    events = [memory_event(1, 4096, 512, 512, 1024), memory_event(2, 4096, 1 << 70, 512, 1024),
              memory_event(3, 4096, 512, -5, 1024), memory_event(4, 4096, 512, 512, 1024, kind=-1),
              {"name": "[memory]", "ts": 5}, {"name": "[memory]", "ts": "now", "args": {}},
              call_event(6, -1, "cudaMalloc"), {"name": "cudaFree", "ph": "X", "ts": 7},
              call_event(1e300, 1, "cudaFree")]
    recording = read(trace(events))
    assert len(recording.usage[0].time_us) == 1
    assert any(note.startswith("8 events") for note in recording.notes)


def test_a_list_of_events_is_a_trace_as_well() -> None:
    """Chrome's other form, a bare list of events, reads like the one with traceEvents."""
    events = [memory_event(1, 4096, 512, 512, 1024), call_event(2, 3, "cudaMalloc")]
    assert read(events) == read(trace(events))


@pytest.mark.parametrize("broken", [
    r'"name": "C:\cuda\x.py(3): f"', '"name": "torch.library.Library("a", "b")"', '"name": "two\nlines"',
    '"value": NaN'])
def test_a_trace_that_is_no_valid_json_reads_all_the_same(broken: str) -> None:
    """Frames that torch did not escape break the JSON, not the reading: the events are found by their names."""
    events = [memory_event(index, 4096, 512, 512 * index, 1024) for index in range(1, 20)]
    text = json.dumps(trace(events, 1_000_000), indent=1)
    whole = _profile_json.parse(text.encode(), "t.json")
    middle = text.index("{", len(text) // 2)
    middle = text.rindex(' {\n   "ph"', 0, middle)
    frame = '{"ph": "X", ' + broken + ', "pid": 1, "tid": 1, "ts": 5, "dur": 1, "args": {}},'
    text = text[:middle] + frame + text[middle:]
    with pytest.raises(ValueError, match=r".*"):
        json.loads(text, parse_constant=lambda word: int(word))
    recording = _profile_json.parse(text.encode(), "t.json")
    assert recording.usage == whole.usage
    assert any("not valid JSON" in note for note in recording.notes)


def test_a_trace_cut_off_gives_what_came_before() -> None:
    """Of a trace whose process died while it was written, every event that is whole is read, and the rest is told."""
    events = [memory_event(index, 4096, 512, 512 * index, 1024) for index in range(1, 20)]
    text = json.dumps(trace(events), indent=1)
    recording = _profile_json.parse(text[:text.index('"ts": 11')].encode(), "t.json")
    assert list(recording.usage[0].time_us) == list(range(1, 11))
    assert any("not valid JSON" in note for note in recording.notes)


@pytest.mark.parametrize(("text", "says"), [
    (b"{", "not valid JSON .* no traceEvents"),
    (b"{}", "no list of traceEvents"),
    (b'{"traceEvents": 3}', "no list of traceEvents"),
    (b'{"traceEvents": [], "baseTimeNanoseconds": "noon"}', "its baseTimeNanoseconds is no whole number"),
    (b'{"traceEvents": []}', "neither"),
    (b'{"traceEvents": [1, null, "[memory]"]}', "neither"),
    (b'{"traceEvents": [{"name": "aten::add"', "not valid JSON .* neither"),
    (b'{"traceEvents": [], "baseTimeNanoseconds": 99999999999999999999}', "no time"),
    (b'{"baseTimeNanoseconds": 9999999999999999999, "traceEvents": [{"ts": 1, "name": "cudaFree", "dur": 1', "no time"),
    (b'{"traceEvents": ' + b"[" * 5000, "not valid JSON"),
])
def test_what_is_wrong_is_said_in_a_sentence(text: bytes, says: str) -> None:
    """A file that is no trace, or holds nothing about memory, is refused with the reason."""
    with pytest.raises(ValueError, match=says):
        _profile_json.parse(text, "t.json")


def test_torch_s_own_trace_is_read(tmp_path: Path) -> None:
    """What torch exports today reads as a plain walk over its JSON does: every event, its time and its total."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        kept = [torch.ones(1000 * size) for size in range(1, 20)]
        del kept[3:9]
    made.export_chrome_trace(str(tmp_path / "t.json"))
    document = json.loads((tmp_path / "t.json").read_text())
    events = sorted((event for event in document["traceEvents"] if event["name"] == "[memory]"),
                    key=lambda event: event["ts"])
    assert len(events) > 20
    usage = _profile_json.parse((tmp_path / "t.json").read_bytes(), "t.json").usage[0]
    assert usage.device == "cpu"
    assert list(usage.allocated) == [event["args"]["Total Allocated"] for event in events]
    assert set(usage.reserved) == {UNKNOWN}
    base = document.get("baseTimeNanoseconds", 0)
    assert list(usage.time_us) == [(base + math.floor(event["ts"]) * 1000) // 1000 for event in events]


@pytest.mark.parametrize(("file", "mallocs", "frees"), [("alexnet", 24, 15), ("cupti", 28, 17)])
def test_real_traces(file: str, mallocs: int, frees: int) -> None:
    """The public traces hold as many cudaMalloc and cudaFree as is known of them, with the medians of a plain count."""
    path = SHARED / f"{file}_trace.json.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} of the shared data is not here.")
    data = gzip.decompress(path.read_bytes())
    found = {entry.name: entry for entry in summary(_profile_json.parse(data, path.name).calls)}
    assert {name: entry.count for name, entry in found.items()} == {"cudaMalloc": mallocs, "cudaFree": frees}
    for name, entry in found.items():
        durations = [event["dur"] for event in json.loads(data)["traceEvents"] if event["name"] == name]
        assert entry.median_ns == statistics.median(durations) * 1000
        assert entry.total_ns == sum(durations) * 1000
