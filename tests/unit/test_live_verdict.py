"""The next step judged live: on request and in out-of-memory records, on a device whose allocator is the twin."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvobs
from kvobs import autostart, model, runtime
from kvobs.allocator import next_step as steps
from kvobs.allocator.forecast import Demand, Forecast, Growth, NextStep
from kvobs.allocator.settings import MIB
from kvobs.allocator.verdict import Verdict
from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.sources import _torch as source
from kvobs.sources import _torch_listen as listen
from kvobs.sources import _torch_oom as oom
from kvobs.sources import _torch_verdict as asked
from kvobs.sources._torch import TorchSource
from kvobs.sources.transformers._demand import OFFLOADED, forecast
from tests.accelerator import Accelerator, Cache, Layer, Tensor
from tests.fake_torch import FakeTorch, segment, stat, stats, unused
from tests.support import run_child

ROW = 64 * 1024  # bytes of a token's K in one layer: 320 of them are 20 MiB


@pytest.fixture(autouse=True)
def _no_trampolines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_attached", [])
    monkeypatch.setattr(listen, "_listening", {})


class Setting:
    """A source on a fake torch, and the caches that are alive."""

    def __init__(self) -> None:
        self.caches: list[Cache] = []
        self.sources: list[TorchSource] = []
        self.events: list[model.Event] = []
        self.tell: Callable[[], Forecast] = lambda: forecast(self.caches)

    def on(self, fake: FakeTorch) -> TorchSource:
        made = TorchSource(Bus(8), fake)
        made.foresee(lambda: self.tell())
        made.install(self.events.append)
        self.sources.append(made)
        return made

    def verdict(self, fake: FakeTorch, device: str | None = None) -> NextStep:
        found, = self.on(fake).verdict(device)
        return found


@pytest.fixture
def setting() -> Iterator[Setting]:
    made = Setting()
    yield made
    for one in made.sources:
        one.uninstall()


def test_a_cache_whose_step_fits_only_because_it_gives_back_as_it_goes(setting: Setting) -> None:
    """Of 256 MiB 56 are left: two of ten 22 MiB segments come from there, the third from returning two old ones."""
    fake = Accelerator(256 * MIB)
    setting.caches = [fake.cache(5, 320, ROW)]
    told = setting.verdict(fake)
    assert (told.device, told.verdict, told.index, told.estimated) == ("cuda:0", Verdict.RECLAIM, 2, True)
    done, _ = fake.step(setting.caches)
    assert (done[:3], len(done), None in done) == ([Verdict.GROW, Verdict.GROW, Verdict.RECLAIM], 10, False)
    assert (told.requests, told.requested_bytes) == (10, 10 * 321 * ROW)
    assert told.sentence.startswith(
        "The next step of 1 cache asks for 10 blocks and 200.62 MiB, giving the old ones back as it goes; number 3 "
        "decides. 20.06 MiB on stream 0 need 22.00 MiB of the device, which gives them once up to 40.00 MiB that ")
    assert told.not_known == (steps.NOT_COUNTED, steps.EACH_ONCE)


@pytest.mark.parametrize("held", ["by autograd", "by another tensor"])
def test_what_somebody_else_holds_is_not_given_back(setting: Setting, held: str) -> None:
    """Where the old buffers stay in use, the third request fails: 12 MiB of the device and two rests of 22 are left."""
    fake = Accelerator(256 * MIB)
    cache = fake.cache(5, 320, ROW)
    setting.caches = [cache]
    for layer in cache.layers:
        layer.keys.requires_grad = layer.values.requires_grad = held == "by autograd"
    if held == "by another tensor":
        setting.caches = [Cache([*cache.layers, *cache.layers])]
    told = setting.verdict(fake)
    assert (told.verdict, told.index) == (Verdict.CAPACITY, 2)
    assert told.evidence is not None
    assert told.evidence.shortfall_bytes == 321 * ROW - 12 * MIB - 2 * (22 * MIB - 321 * ROW)


def test_all_live_caches_are_judged_together(setting: Setting) -> None:
    """Two caches that would each be served alone: the free 24 MiB go to the first, the second has to grow."""
    fake = Accelerator(256 * MIB)
    setting.caches = [Cache([Layer(*[Tensor(fake.twin.alloc(11 * MIB), 11, MIB, grad=True) for _ in "kv"])])]
    fake.twin.free(fake.twin.alloc(24 * MIB))
    alone = setting.verdict(fake)
    assert (alone.verdict, alone.index) == (Verdict.SERVED, 0)
    setting.caches *= 2
    both = setting.verdict(fake)
    assert (both.verdict, both.index, both.requests) == (Verdict.GROW, 2, 4)


def test_each_cache_grows_on_its_own_stream(setting: Setting) -> None:
    """A cache that lies on stream 7 is judged there: what is free on stream 0 does not serve it."""
    fake = Accelerator(84 * MIB)
    setting.caches = [fake.cache(1, 320, ROW), fake.cache(1, 320, ROW, stream=7)]
    told = setting.verdict(fake)
    assert (told.verdict, told.index) == (Verdict.CAPACITY, 0)
    fake = Accelerator(112 * MIB)
    fake.twin.free(fake.twin.alloc(24 * MIB, stream=3))
    setting.caches = [fake.cache(1, 320, ROW, stream=7)]
    told = setting.verdict(fake)
    assert told.evidence is not None
    assert (told.verdict, told.evidence.stream) == (Verdict.GROW, 7)


def test_a_memory_fraction_is_respected(setting: Setting) -> None:
    """With half of 160 MiB allowed and 40 in use, a second segment of 22 MiB is one too many."""
    fake = Accelerator(160 * MIB)
    setting.caches = [Cache([Layer(*[Tensor(fake.twin.alloc(20 * MIB), 320, ROW, grad=True) for _ in "kv"])])]
    assert setting.verdict(fake).verdict is Verdict.GROW
    fake.share = 0.5
    told = setting.verdict(fake)
    assert (told.index, told.evidence is not None and told.evidence.allowed_left_bytes) == (1, 18 * MIB)
    assert told.verdict not in (Verdict.SERVED, Verdict.GROW, Verdict.RECLAIM)


def test_one_snapshot_is_taken_and_none_where_nothing_grows(setting: Setting) -> None:
    """The allocator's lock is taken once per question, and not at all while no cache is alive."""
    fake = Accelerator(256 * MIB)
    fake.twin.alloc(MIB)
    told = setting.verdict(fake)
    assert (told.verdict, told.sentence, fake.snapshots) == (
        None, steps.NOTHING_GROWS.format(device="cuda:0"), 0)
    setting.caches = [fake.cache(1, 8, ROW)]  # 512 kB twice: with the 1 MiB they fill a small segment
    assert setting.verdict(fake).verdict is Verdict.GROW
    assert fake.snapshots == 1


def test_too_much_to_judge_is_judged_as_far_as_it_goes(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step too long, a failure among its first requests is a verdict; where they succeed there is none."""
    fake = Accelerator(256 * MIB)
    setting.caches = [fake.cache(5, 320, ROW)]
    for layer in setting.caches[0].layers:
        layer.keys.requires_grad = layer.values.requires_grad = True
    monkeypatch.setattr(asked, "MOST_WORK", 3 * 10)  # there are ten blocks
    assert (setting.verdict(fake).verdict, setting.verdict(fake).index) == (Verdict.CAPACITY, 2)
    monkeypatch.setattr(asked, "MOST_WORK", 3 * 10 - 1)
    told = setting.verdict(fake)
    assert (told.verdict, told.requests) == (None, 10)
    assert "the first 2 are served, the others were not judged" in told.sentence
    monkeypatch.setattr(asked, "MOST_WORK", 9)
    assert "too many blocks" in setting.verdict(fake).sentence


def alive(fake: FakeTorch) -> Forecast:
    return Forecast((Growth(Demand("cuda:0", 0, 0, (2 * MIB,))),))


@pytest.mark.parametrize(("made", "why"), [
    (lambda: FakeTorch(kind=None), source.NO_ACCELERATOR),
    (lambda: FakeTorch(initialised=False), source.NOT_YET),
    (lambda: FakeTorch(backend="cudaMallocAsync"), "there is cudaMallocAsync of cuda"),
    (lambda: FakeTorch(kind="xpu"), "torch.xpu does not list its segments"),
    (lambda: FakeTorch([unused()]), asked.UNUSED.format(kind="cuda")),
    (lambda: FakeTorch([stats(active=stat(asked.MOST_BLOCKS))]), asked.CROWDED),
])
def test_where_there_is_no_verdict_the_answer_says_why(setting: Setting, made: Callable[[], FakeTorch],
                                                       why: str) -> None:
    """One answer without a verdict, whose sentence is the reason; no snapshot is taken for it."""
    fake = made()
    setting.tell = lambda: alive(fake)
    told = setting.verdict(fake)
    assert (told.verdict, told.evidence, fake.snapshots) == (None, None, 0)
    assert why in told.sentence


def test_during_a_capture_or_a_recorded_history_no_snapshot_is_taken(setting: Setting) -> None:
    """A CUDA graph's capture and a host's own memory history are left alone, which the answer says."""
    fake = FakeTorch()
    setting.tell = lambda: alive(fake)
    made, graph = setting.on(fake), fake.cuda.graphs.CUDAGraph()
    graph.capture_begin()
    assert [told.sentence for told in made.verdict()] == [asked.CAPTURING]
    graph.capture_end()
    fake.history = True
    assert [told.sentence for told in made.verdict()] == [asked.HISTORY]
    assert fake.snapshots == 0


def test_a_forked_child_does_not_touch_the_accelerator(setting: Setting) -> None:
    """What the parent had initialised cannot be used in its child: the answer says so, and nothing is read."""
    fake = FakeTorch()
    setting.tell = lambda: alive(fake)
    made = setting.on(fake)
    made.after_fork_in_child()
    assert [told.sentence for told in made.verdict()] == [source.FORKED]
    assert (fake.snapshots, fake.reads) == (0, [])


def test_one_answer_per_device_that_is_used(setting: Setting) -> None:
    """Of three devices one is unused and not touched: no context is made there; one has no cache that grows."""
    fake, touched = FakeTorch([stats(), unused(), stats()]), list[int]()
    fake.snapshot = [segment((4 * MIB, "inactive"))]
    fake.cuda.mem_get_info = lambda index: touched.append(index) or (0, 0)
    setting.tell = lambda: alive(fake)
    made = setting.on(fake)
    assert [(told.device, told.verdict) for told in made.verdict()] == [
        ("cuda:0", Verdict.SERVED), ("cuda:2", None)]
    assert 1 not in touched
    assert [told.device for told in made.verdict("cuda:2")] == ["cuda:2"]
    unknown, = made.verdict("cuda:9")
    assert unknown.sentence == asked.NOT_THERE.format(device="cuda:9", known="cuda:0, cuda:2")


def test_what_breaks_is_an_answer_and_not_an_error(setting: Setting) -> None:
    """A snapshot that makes no sense, or a forecast that raises, never reaches the caller."""
    fake = FakeTorch()
    fake.snapshot = [{"total_size": "?"}]
    setting.tell = lambda: alive(fake)
    assert setting.verdict(fake).sentence.startswith("No verdict: it could not be told (")

    def broken() -> Forecast:
        raise KeyError("x")

    setting.tell = broken
    assert setting.verdict(fake).sentence == asked.FAILED.format(error="KeyError")


def test_caches_whose_growth_is_not_known_are_named(setting: Setting) -> None:
    """Offloaded and quantized caches are left out of the demand, and the answer says so beside the others' verdict."""
    fake = Accelerator(256 * MIB)
    offloaded, quantized = fake.cache(1, 8, ROW), fake.cache(1, 8, ROW)
    offloaded.offloading = True  # type: ignore[attr-defined]
    quantized.layers[0]._quantized_keys = None  # type: ignore[attr-defined]
    setting.caches = [offloaded, quantized, fake.cache(1, 8, ROW)]
    told = setting.verdict(fake)
    assert (told.verdict, told.requests) == (Verdict.GROW, 2)  # 576 kB twice; the two small segments have 1 MiB left
    assert told.not_known[2:] == (OFFLOADED, "How a layer of type Layer grows is not known.")


def record(setting: Setting, fake: FakeTorch, requested: int = 2048 * MIB) -> dict[str, Any]:
    """The snapshot of the flight record of one failed request."""
    setting.on(fake)
    fake.run_out(requested=requested)
    flight = next(event for event in reversed(setting.events) if isinstance(event, model.FlightRecord))
    assert len(flight.snapshot) <= oom.SNAPSHOT_LIMIT
    found: dict[str, Any] = json.loads(flight.snapshot)
    return found


def test_an_out_of_memory_record_tells_of_the_next_step(setting: Setting) -> None:
    """Beside the verdict on what failed: could the caches go on? With the 100 MiB that the device has they can."""
    fake = Accelerator(200 * MIB)
    setting.caches = [fake.cache(5, 320, ROW)]
    found = record(setting, fake)
    assert found["verdict"]["verdict"] == "CAPACITY"
    step = found["next_step"]
    assert (step["estimated"], step["verdict"], step["index"], step["requests"]) == (True, "RECLAIM", 4, 10)
    assert step["evidence"]["device_free_bytes"] == (100 - 4 * 22) * MIB
    assert "number 5 decides" in step["sentence"]
    assert fake.snapshots == 1


def test_a_next_step_that_cannot_be_told_costs_nothing_else(setting: Setting) -> None:
    """A forecast that raises inside the failing allocation leaves record and verdict whole."""
    fake = Accelerator(200 * MIB)
    fake.twin.alloc(20 * MIB)

    def broken() -> Forecast:
        raise KeyError("x")

    setting.tell = broken
    found = record(setting, fake)
    assert found["next_step"] == {"estimated": True, "verdict": None, "reason": "It could not be told (KeyError)."}
    assert (found["verdict"]["verdict"], found["totals"]["reserved"]) == ("CAPACITY", 20 * MIB)


def test_a_record_of_a_crowded_allocator_keeps_its_size(setting: Setting) -> None:
    """300 streams with pinned segments and two long verdicts: the record stays within its limit and is valid."""
    fake = Accelerator(1 << 40)
    for stream in range(300):
        for _ in range(3):
            fake.twin.alloc(3 * MIB, stream)
            fake.twin.free(fake.twin.alloc(4 * MIB, stream))
    setting.caches = [fake.cache(4, 320, ROW)]
    setting.tell = lambda: forecast(setting.caches)._replace(unknown=("It is not known what else.",) * 20)
    found = record(setting, fake)
    assert found["omitted"] > 0
    assert found["next_step"]["verdict"]


def test_the_handle_answers_from_any_thread(setting: Setting) -> None:
    """Sources that know demands and the one that judges are joined by the runtime; threads ask at the same time."""
    fake, bus = Accelerator(256 * MIB), Bus(8)
    cache = fake.cache(5, 320, ROW)

    class Engine:
        name = "engine"
        install = uninstall = lambda self, *_: None
        sample = lambda self, now_ns: ()  # noqa: E731
        availability = lambda self: ()  # noqa: E731
        demands = lambda self: forecast([cache])  # noqa: E731

    found = runtime.Runtime(Config(store=None, prometheus=None, otlp="off"), [TorchSource(bus, fake), Engine()])
    assert found.verdict()[0].sentence == runtime.UNOBSERVED
    found.start()
    answers: list[NextStep] = []
    try:
        threads = [threading.Thread(target=lambda: answers.extend(found.verdict())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        found.stop()
    assert [(told.verdict, told.index) for told in answers] == [(Verdict.RECLAIM, 2)] * 4
    assert found.verdict()[0].sentence == runtime.UNOBSERVED


def test_on_a_machine_without_an_accelerator_the_handle_says_so() -> None:
    """Through kvobs.instrument on a real torch for the CPU: one answer, no verdict, and the reason."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
    if torch.accelerator.current_accelerator() is not None:
        pytest.skip("This torch has an accelerator.")
    with kvobs.instrument(store=None, prometheus=None, otlp="off") as observed:
        told, = observed.verdict()
    assert (told.verdict, told.device, told.sentence) == (None, "", source.NO_ACCELERATOR)


def test_without_kvobs_the_handle_says_so() -> None:
    """A handle of a process that is not observed answers too."""
    told, = autostart.Handle().verdict("cuda:0")
    assert (told.verdict, told.device, told.sentence) == (None, "cuda:0", "This process is not observed.")


def test_the_twin_is_not_imported_at_a_process_start() -> None:
    """What every observed process imports has the words of a verdict and of a map, not the code that makes one."""
    done = run_child([sys.executable, "-c", "import sys, kvobs.runtime; "
                      "print(*(name for name in sys.modules if name.startswith('kvobs.allocator.')))"])
    words = {"kvobs.allocator.forecast", "kvobs.allocator.memory_map", "kvobs.allocator.state"}
    assert (set(done.stdout.split()) - words, done.returncode) == (set(), 0), done.stderr
