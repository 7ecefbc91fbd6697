"""Source torch on the real virtual GPU: what the scenes of ``virtual_scenes`` saw, in one process of their own."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import pytest

from kvobs.catalog import LATENCY_BUCKETS
from tests.support import ROOT, child_environment, run_child

pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[transformers]'")
pytestmark = pytest.mark.torch

MIB = 1 << 20


@functools.cache
def scenes() -> dict[str, Any]:
    """What every scene saw; a reason alone where there is no virtual GPU."""
    # Asked in a child too: it is loaded to find out, and compiled the first time.
    asked = run_child([sys.executable, "-c", "from kvobs.virtual import why_not; print(why_not() or '')"], cwd=ROOT,
                      env=child_environment(), timeout=600)
    assert asked.returncode == 0, asked.stderr
    if reason := asked.stdout.strip():
        return {"reason": reason}
    done = run_child([sys.executable, "-m", "tests.contract.virtual_scenes"], cwd=ROOT, env=child_environment(),
                     timeout=600)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def scene(name: str) -> Any:
    seen = scenes()
    if "reason" in seen:
        pytest.skip(seen["reason"])
    failed = seen[name].get("failed") if isinstance(seen[name], dict) else None
    assert failed is None, failed
    return seen[name]


def test_the_names_of_the_fake_are_those_of_the_virtual_gpu() -> None:
    """What the fake accelerator of the unit tests answers is there under the same names in the real one."""
    assert scene("names") == []


def test_an_accelerator_that_comes_later_is_observed() -> None:
    """There is none when kvobs starts; one sample after it has registered itself its errors are recorded."""
    available, failed, devices = scene("kvobs first")
    assert (available, failed, devices) == (False, True, ["vgpu:1"])


def test_an_accelerator_that_came_before_is_observed_at_once() -> None:
    """Without any sample, 30 MiB beside 40 of 64 are one record: its device, the very request, CAPACITY, all held."""
    device, requested, verdict, request, same, kept = scene("setup first")
    assert (device, requested, verdict) == ("vgpu:1", 30 * MIB, "CAPACITY")
    assert request == {"least_bytes": 30 * MIB, "most_bytes": 30 * MIB, "stream": 0, "pool": 0}
    assert (same, kept) == (True, True)


def test_everything_is_available() -> None:
    """On a virtual GPU that is in use no fact of the source has a reason."""
    facts, _ = scene("available")
    assert len(facts) == 9
    assert {subject: fact for subject, fact in facts.items() if fact != [True, ""]} == {}


def test_states_are_torch_s_own_statistics() -> None:
    """Reserved, allocated and largest free bytes equal torch's statistics, its snapshot, and the sum done by hand.

    16 MiB have a segment of their own; 7, 3, 5 and 4 share one of 20, the last with the rest of 1 MiB that is too
    small to be split off. Then 7 and 5 are given back.
    """
    told, expected = scene("states")
    assert told == expected
    assert told == [["vgpu:0", 36 * MIB, 24 * MIB, 7 * MIB], ["vgpu:1", 12 * MIB, 12 * MIB, 0]]


def test_fragmentation_is_told_from_capacity() -> None:
    """12 MiB are free in each of three segments that a block of 6 pins, so that 20 fail: the record says FRAGMENTED."""
    assert scene("fragmentation") == ["FRAGMENTED", 3]


def test_nothing_is_left_attached() -> None:
    """An error between two observations makes no record; the host's own observer is called until it is detached."""
    first, second, host_calls, host_saw, works = scene("attached")
    assert (first, second) == (1, 1)
    assert (host_calls, host_saw, works) == (2, [0, 100 * MIB], MIB)


def test_the_stream_of_the_request_is_judged() -> None:
    """A request that fails in a stream's context is judged on that stream, whose segments bear the same number."""
    assert scene("streams") == [True, True]


def test_latencies_count_every_allocation() -> None:
    """Seven requests of 2 MiB are seven in the buckets of one poll and none in the next; four are given back."""
    polls, buckets, took_time, growth = scene("latencies")
    assert (polls, buckets, took_time) == ([7], len(LATENCY_BUCKETS) + 1, True)
    assert growth == {"kvobs.alloc.operations": [7, 4], "kvobs.alloc.io": [14 * MIB, 8 * MIB]}


def test_modelled_latencies_are_said_to_be() -> None:
    """With a profile the setting and the fact say so, and three segments take three times the profile's cudaMalloc."""
    setting, fact, long_enough = scene("modelled")
    assert (setting, long_enough) == (1, True)
    assert fact == [True, "The time that calls for device memory take is modelled (A100 profile)."]


def test_copies_are_counted() -> None:
    """Three copies to a device, two between devices and one back are the growth of their pairs, in number and bytes."""
    operations, moved, same, _ = scene("copies")
    assert operations == {"cpu|vgpu:0": 3, "vgpu:0|vgpu:1": 2, "vgpu:1|cpu": 1}
    assert moved == {pair: number * MIB for pair, number in operations.items()}
    assert same


@pytest.mark.parametrize(("size", "expected"), [
    ("12 MiB", ["GROW", 0, "served", 2, 0]),  # twice 14 MiB of the 38 that are left of 64
    ("18 MiB", ["RECLAIM", 1, "served", 2, 1]),  # 20 of the 26 that are left, then 20 with the 18 of the old keys
    ("26 MiB", ["CAPACITY", 0, "out of memory", 0, 1]),  # 28 of the 10 that are left
])
def test_the_next_step_does_what_the_verdict_says(size: str, expected: list[Any]) -> None:
    """Verdict and deciding request of one more token; then, done with real tensors, its end, segments and retries."""
    assert scene(size) == expected


def test_a_forked_child_is_observed_with_its_own_memory() -> None:
    """A child allocates beside what it inherited and is told so; its parent's figures stay as they were."""
    (child_saw, child_recorded), parent_saw = scene("forked")
    assert (child_saw, child_recorded) == (8 * MIB, ["vgpu:0"])
    assert parent_saw == 3 * MIB


def test_a_recorded_history_costs_no_verdict() -> None:
    """While the host records a memory history the same step is judged all the same."""
    assert scene("history") == "GROW"
