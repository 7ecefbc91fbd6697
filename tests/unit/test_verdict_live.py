"""Verdicts inside the process: on the segments that torch lists, and on the demand of the next step."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvobs import model
from kvobs.allocator.forecast import Demand
from kvobs.allocator.live import requests_of, retry, state_of
from kvobs.allocator.settings import MIB, SMALL_SEGMENT, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING
from kvobs.sources import _torch_listen as listen
from kvobs.sources import _torch_oom as oom
from kvobs.sources.transformers._demand import demands
from tests.fake_torch import FakeTorch, segment, stat, stats


def placed(address: int, *blocks: tuple[int, str], **more: Any) -> dict[str, Any]:
    """A segment as torch lists it, with addresses."""
    found, at = segment(*blocks, **more), address
    found["address"] = address
    for block in found["blocks"]:
        block["address"] = at
        at += block["size"]
    return found


SEGMENTS = [placed(64 * MIB, (4 * MIB, "active_allocated"), (12 * MIB, "inactive"), (4 * MIB, "active_awaiting_free")),
            placed(0, (30 * MIB, "inactive"), (2 * MIB, "active_allocated"), stream=7, pool=(0, 3), expandable=True),
            placed(0, (20 * MIB, "inactive"), device=1)]


def test_what_torch_lists_becomes_a_state() -> None:
    """Blocks keep address, size and state; segments are those of one device, in order of address."""
    state = state_of(SEGMENTS, 0)
    assert [(one.address, one.size, one.stream, one.pool > 0, one.expandable) for one in state] == [
        (0, 32 * MIB, 7, True, True), (64 * MIB, 20 * MIB, 0, False, False)]
    assert [(block.address, block.size, block.state) for block in state[1].blocks] == [
        (64 * MIB, 4 * MIB, ALLOCATED), (68 * MIB, 12 * MIB, INACTIVE), (80 * MIB, 4 * MIB, PENDING)]
    assert len(state_of(SEGMENTS, 1)) == 1
    assert state_of(SEGMENTS, 2) == ()


@pytest.mark.parametrize("settings", [
    Settings(), Settings(large_segment_size=32 * MIB), Settings(roundup_power2_divisions=(4,) * 16)])
def test_requests_are_bounded_by_what_the_device_was_asked(settings: Settings) -> None:
    """Both bounds, and nothing just outside of them, lead to a segment of the size that was asked of the device."""
    for asked in (SMALL_SEGMENT, settings.large_segment_size, 28 * MIB, 512 * MIB):
        least, most = requests_of(asked, settings)
        assert [settings.segment_size(settings.round_size(size)) for size in (least, most)] == [asked, asked]
        assert settings.segment_size(settings.round_size(most + 1)) != asked
        assert least == 1 or settings.segment_size(settings.round_size(least - 1)) != asked


def test_a_retry_is_judged_at_both_bounds() -> None:
    """20 MiB asked of the device may be a request that 12 free MiB serve or one they do not: both verdicts are told."""
    told = retry(SEGMENTS, "", 0, 0, 20 * MIB, 52 * MIB, 0)
    assert (told["verdict"], told["between"]) == (None, ["SERVED", "WRONG_POOL"])
    assert told["evidence"]["elsewhere"] == {"stream": 7, "pool": 1, "small": False}
    told = retry(SEGMENTS, "", 0, 0, 64 * MIB, 1 << 40, MIB)
    assert told["verdict"] == "CAPACITY"
    assert told["evidence"]["shortfall_bytes"] == (64 - 30 - 12 - 4 - 1) * MIB
    assert json.loads(json.dumps(told)) == told


def record(fake: FakeTorch, requested: int) -> dict[str, Any]:
    """The snapshot of the flight record of one failed request."""
    events: list[model.Event] = []
    observer = oom.OomObserver(fake, events.append, lambda: True, lambda: False)
    observer.start()
    try:
        fake.run_out(requested=requested)
    finally:
        observer.stop()
    flight, = (event for event in events if isinstance(event, model.FlightRecord))
    found: dict[str, Any] = json.loads(flight.snapshot)
    return found


@pytest.fixture(autouse=True)
def _no_trampolines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "_attached", [])
    monkeypatch.setattr(listen, "_listening", {})


def test_a_flight_record_holds_the_verdict() -> None:
    """An out-of-memory error's record says why: here 100 MiB of the device and 42 free are too little for 2 GiB."""
    fake = FakeTorch()
    fake.snapshot = SEGMENTS
    found = record(fake, 2048 * MIB)
    assert found["verdict"]["verdict"] == "CAPACITY"
    assert found["verdict"]["evidence"]["device_free_bytes"] == 100 * MIB
    assert found["verdict"]["evidence"]["shortfall_bytes"] == (2048 - 100 - 42 - 4) * MIB
    assert found["totals"]["reserved"] == 72 * MIB


def test_the_stream_of_the_thread_is_judged() -> None:
    """The failing request is on the thread's current stream, whose free blocks are its own."""
    fake = FakeTorch()
    fake.snapshot = [placed(0, (64 * MIB, "inactive"), (2 * MIB, "active_allocated"), stream=7)]
    assert record(fake, 128 * MIB)["verdict"]["evidence"]["group_free_bytes"] == 0
    fake._C._cuda_getCurrentRawStream = lambda device: 7
    found = record(fake, 128 * MIB)["verdict"]
    assert (found["request"]["stream"], found["evidence"]["group_free_bytes"]) == (7, 64 * MIB)


def test_a_record_without_a_verdict_says_why() -> None:
    """Too many blocks, or segments that make no sense, cost the verdict and not the record."""
    fake = FakeTorch()
    fake.snapshot = [placed(0, (MIB, "haunted"))]
    found = record(fake, MIB)
    assert found["verdict"] == {"verdict": None, "reason": "It could not be told (Refused)."}
    fake.devices = [stats(active=stat(oom.MOST_JUDGED + 1))]
    found = record(fake, MIB)
    assert found["verdict"] == {"verdict": None, "reason": oom.UNJUDGED}


class Layer:
    """A layer of a cache on the meta device, which holds nothing."""

    def __init__(self, torch: Any, rows: int, *, width: int = 64, device: str = "meta") -> None:
        self.keys = torch.empty(2, 3, rows, 64, dtype=torch.bfloat16, device=device)
        self.values = torch.empty(2, 3, rows, width, dtype=torch.bfloat16, device=device)


def test_the_next_step_asks_for_one_row_more_of_every_growing_layer() -> None:
    """2 x 3 heads x 101 rows x 64 x 2 bytes for K, then V of its own width; per device in order."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
    found = demands([Layer(torch, 100), Layer(torch, 100, width=32), Layer(torch, 9, device="cpu")])
    assert [demand._replace(returns=()) for demand in found] == [
        Demand("meta", 0, 0, (77_568, 77_568, 77_568, 38_784)), Demand("cpu", 0, 0, (7_680, 7_680))]


def test_a_layer_filled_in_place_asks_for_nothing_and_an_unknown_one_is_refused() -> None:
    """Static layers make no request; what a quantized layer, or one of another shape, will ask for is not told."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
    static, quantized, flat = Layer(torch, 100), Layer(torch, 100), Layer(torch, 100)
    static.max_cache_len = 128  # type: ignore[attr-defined]
    quantized._quantized_keys = None  # type: ignore[attr-defined]
    flat.values = flat.values.flatten(2)
    assert demands([static]) == []
    for layer in (quantized, flat):
        with pytest.raises(ValueError, match="is not known"):
            demands([layer])


@pytest.mark.parametrize("window", [None, 8])
def test_the_predicted_requests_are_those_that_a_real_cache_makes(window: int | None) -> None:
    """Over 20 steps of a real DynamicCache, each new K and V has the storage that was predicted one step before."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
    transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[transformers]'")
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    if window is not None:
        config = transformers.MistralConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4,
                                            num_key_value_heads=2, sliding_window=window)
    cache = transformers.DynamicCache(config=config)
    for step in range(20):
        predicted = demands(cache.layers) if step else []
        rows = 1 if step else 5
        for index in range(2):
            cache.update(torch.zeros(1, 2, rows, 16), torch.zeros(1, 2, rows, 16), index)
        made = [tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in (layer.keys, layer.values)]
        assert not step or [demand._replace(returns=()) for demand in predicted] == [
            Demand("cpu", 0, 0, tuple(made))]
