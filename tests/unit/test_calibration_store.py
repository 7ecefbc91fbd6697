"""Where calibration's samples come from: stores joined by second, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvobs import model
from kvobs.catalog import BY_NAME, LATENCY_BUCKETS
from kvobs.cli._calibrate_data import collect
from kvobs.cli._errors import Refused
from kvobs.metrics import Histogram
from kvobs.slo.calibration import Question
from kvobs.store import StoreWriter
from tests.events import EXAMPLES

SECOND = 10**9
BEGAN = 1_700_000_000
SIGNAL, ALLOCATION = "kvobs.window.fragmentation", "kvobs.alloc.latency"
TTFT, TPOT = "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"


def asked(latency: str = ALLOCATION, signal: str = SIGNAL, slo_ns: int = 12_000_000, window_s: int = 1) -> Question:
    return Question(signal=signal, latency=latency, slo_ns=slo_ns, quantile=0.95, delta=0.1,
                    window_ns=window_s * SECOND)


class Engine:
    """Writes a process's store, second by second after BEGAN."""

    def __init__(self, directory: Path, process: str = "one") -> None:
        self.now = 0
        self.writer = StoreWriter(directory, 8 << 20, process, clock=lambda: self.now, wall=lambda: BEGAN * SECOND)

    def second(self, at: int, signals: dict[str, float], *events: model.Event,
               counts: Sequence[int] | None = None) -> None:
        """A point per device, half a second in, and events; ``counts`` are those of kvobs.alloc.latency."""
        self.now = at * SECOND + SECOND // 2
        self.writer.write(events)
        families = [(BY_NAME[SIGNAL], {(device,): value for device, value in signals.items()})]
        if counts is not None:
            latencies = Histogram(LATENCY_BUCKETS)
            latencies.add(counts, 0.0)
            families.append((BY_NAME[ALLOCATION], {("cpu",): latencies}))
        self.writer.write_points(families)
        self.writer.commit()

    def close(self) -> None:
        self.writer.close()


def allocation(at: float, latency_ns: int, device: str = "cuda:0") -> model.Allocation:
    return model.Allocation(int(at * SECOND), device, 512, latency_ns)


def turn(start: float, end: float, ttft_ns: int | None, tpot_ns: int | None) -> model.Turn:
    example, = [one for one in EXAMPLES if isinstance(one, model.Turn)]
    return msgspec.structs.replace(
        example, t_ns=int(end * SECOND), start_ns=int(start * SECOND), ttft_ns=ttft_ns, tpot_ns=tpot_ns,
        wall_start_ns=int((BEGAN + start) * SECOND))


def pairs(path: Path, question: Question, where: Sequence[str] = ()) -> list[tuple[int, float, float]]:
    """The windows as (seconds after BEGAN, signal, latency in ms)."""
    found, _ = collect(path, question, where)
    return [(round(slot * found.width_s) - BEGAN, signal, round(latency * 1000, 6))
            for slot, signal, latency in zip(found.slots, found.signals, found.latencies, strict=True)]


def test_allocations_are_joined_by_second(tmp_path: Path) -> None:
    """Each second's slowest allocation meets its signal; a state without an allocation is no latency of zero."""
    engine = Engine(tmp_path)
    engine.second(1, {"cuda:0": 0.25}, allocation(1.1, 3_000_000), allocation(1.2, 13_000_000))
    engine.second(2, {"cuda:0": 0.5}, model.AllocatorState(2 * SECOND, "cuda:0", 100, 50, None))
    engine.second(3, {"cuda:0": 0.75}, allocation(3.1, 1_000_000))
    engine.close()
    assert pairs(tmp_path, asked()) == [(1, 0.25, 13), (3, 0.75, 1)]
    found, notes = collect(tmp_path, asked(), [])
    assert (found.samples, found.absent, found.incomplete, notes) == (3, 1, 1, [])
    assert [row[1:] for row in pairs(tmp_path, asked(window_s=1_000))] == [(0.75, 13)]


def test_where_chooses_among_series_and_devices(tmp_path: Path) -> None:
    """Of several series one has to be chosen, and the choice holds for the latencies' device too."""
    engine = Engine(tmp_path)
    engine.second(1, {"cuda:0": 0.25, "cuda:1": 0.5}, allocation(1.1, 3_000_000), allocation(1.2, 9_000_000, "cuda:1"))
    engine.close()
    with pytest.raises(Refused, match=r"has 2 series here \(device=cuda:0, or device=cuda:1\): choose one by --where"):
        collect(tmp_path, asked(), [])
    assert pairs(tmp_path, asked(), ["device=cuda:1"]) == [(1, 0.5, 9)]
    with pytest.raises(Refused, match=r"has no values of kvobs\.window\.fragmentation for this --where\."):
        collect(tmp_path, asked(), ["device=cuda:2"])
    with pytest.raises(Refused, match=r"neither .* has an attribute 'rank'; allowed are device"):
        collect(tmp_path, asked(), ["rank=1"])


def test_allocations_counted_by_bucket_are_judged_at_a_bound(tmp_path: Path) -> None:
    """Where only counts by bucket are kept, a second's latency is the bound of the highest bucket that grew."""
    below, above = LATENCY_BUCKETS.index(0.012), len(LATENCY_BUCKETS)
    counts = [0] * (above + 1)
    engine = Engine(tmp_path)
    for at, bucket in enumerate((below, below, None, below + 1, above)):
        if bucket is not None:
            counts[bucket] += 1
        engine.second(at, {"cpu": at / 10}, counts=counts)
    engine.close()
    assert pairs(tmp_path, asked()) == [(1, 0.1, 12), (3, 0.3, 25), (4, 0.4, math.inf)]
    with pytest.raises(Refused, match=r"--slo: these allocations were counted by bucket, so that allowed are .*12 ms"):
        collect(tmp_path, asked(slo_ns=11_000_000), [])


def test_latencies_of_turns_count_when_they_are_known(tmp_path: Path) -> None:
    """A first token counts in its second, the time per token at the turn's end; a turn without one has none."""
    engine = Engine(tmp_path)
    for at in range(7):
        engine.second(at, {"cuda:0": at / 10})
    engine.second(7, {"cuda:0": 0.7}, turn(1.5, 6.2, 2 * SECOND, 40_000_000), turn(1, 5.5, None, None))
    engine.close()
    assert pairs(tmp_path, asked(TTFT)) == [(3, 0.3, 2_000)]
    assert pairs(tmp_path, asked(TPOT)) == [(6, 0.6, 40)]


def test_processes_are_not_mixed(tmp_path: Path) -> None:
    """The signal of one process never meets the latency of another, and windows come in the order of time."""
    for process, value, at in (("b", 0.25, 1), ("a", 0.5, 2)):
        engine = Engine(tmp_path, process)
        for second in (1, 2, 3):
            engine.second(second, {"cuda:0": value}, *([allocation(second, 5_000_000)] if second != at else []))
        engine.close()
    assert pairs(tmp_path, asked()) == [(1, 0.5, 5), (2, 0.25, 5), (3, 0.5, 5), (3, 0.25, 5)]


@pytest.mark.parametrize(("question", "where", "why"), [
    (asked(signal="kvobs.window.fragmentatoin"), [], "did you mean kvobs.window.fragmentation?"),
    (asked(signal="kvobs.turns"), [], "--signal: kvobs.turns is no gauge of the catalog"),
    (asked("kvobs.step.duration"), [], f"of a store {ALLOCATION}, {TTFT}, {TPOT} are allowed"),
    (asked(TTFT), [], f"has no values of {TTFT}."), (asked(), ["device"], "'device' is no attribute=value."),
    (asked(), ["=x"], "'=x' is no attribute=value.")])
def test_what_a_store_does_not_have_is_refused(tmp_path: Path, question: Question, where: list[str], why: str) -> None:
    """An unknown signal, latency or attribute, and one without values, are one sentence each."""
    engine = Engine(tmp_path)
    engine.second(1, {"cuda:0": 0.25}, allocation(1.1, 3_000_000))
    engine.close()
    with pytest.raises(Refused) as refusal:
        collect(tmp_path, question, where)
    assert why in str(refusal.value)
