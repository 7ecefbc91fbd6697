"""What a breaker asks for each second: of sources that tell, of those that fail, and of the caches that live."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.breaker import load_policy
from kvobs.breaker._breaker import Breaker
from kvobs.breaker._live import Asked
from kvobs.metrics import Metrics
from kvobs.model import Availability, DeviceNow
from tests import events

SECOND = 10**9


def raising(*_: Any) -> Any:
    raise RuntimeError("the driver is gone")


def test_what_sources_tell_becomes_signals(caplog: pytest.LogCaptureFixture) -> None:
    """Each device has its own headroom and verdict; no verdict has its reason; a source that fails is said once."""
    metrics = Metrics(window_ms=64, max_series=100)
    metrics.fold([events.step(t_ns=1, cache_id=1)])
    metrics.refresh(SECOND)
    breaker = Breaker(load_policy("article"), "observe", list)
    sources: list[Any] = [
        SimpleNamespace(name="bad", live=raising), SimpleNamespace(name="silent"),
        SimpleNamespace(name="busy", live=lambda now_ns, share: None),
        SimpleNamespace(name="torch", live=lambda now_ns, share: [
            DeviceNow("vgpu:0", 0.25, "CAPACITY"), DeviceNow("vgpu:1", 0.5, None, "Nobody knows.")])]
    asked = Asked(metrics, 0.01)
    with caplog.at_level(logging.WARNING, logger="kvobs"):
        for _ in range(2):
            facts = asked.tell(breaker, sources, SECOND)
    assert facts == [Availability("breaker verdict vgpu:0", True, ""),
                     Availability("breaker verdict vgpu:1", False, "Nobody knows.")]
    assert [record.getMessage() for record in caplog.records] == [
        "kvobs: the breaker goes on without what bad says of devices (RuntimeError: the driver is gone)."]
    found = breaker._senses.signals(SECOND, [])
    told = {device: {name: reading.value for name, reading in readings.items()} for device, readings in found.items()}
    assert told["vgpu:0"]["headroom"] == 0.25
    assert told["vgpu:0"]["verdict"] == "CAPACITY"
    assert "verdict" not in told["vgpu:1"]
    rates = metrics.gauge("kvobs.kv.fragmentation.article")
    assert rates
    for (_, device, _), rate in rates.items():
        assert told[device]["fragmentation_article"] == rate
