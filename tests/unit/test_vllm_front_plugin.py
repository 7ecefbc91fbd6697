"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from kvobs import autostart, model
from kvobs.plugins import _vllm_endpoints
from kvobs.plugins._vllm import INSPECTION, general
from kvobs.plugins._vllm_endpoints import OFF, document
from kvobs.store import StoreWriter
from tests.events import ORIGIN


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects how often kvobs was armed."""
    calls: list[str] = []
    monkeypatch.setattr(autostart, "arm", lambda _: calls.append("armed"))
    return calls


def test_every_process_of_a_server_is_armed_but_the_one_that_looks_at_a_model(
        armed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is armed whatever its main module is; only vLLM's inspection of a model's class is left alone."""
    for name, expected in (("vllm.entrypoints.openai.api_server", 1), (None, 2), (INSPECTION, 2)):
        main = ModuleType("__main__")
        main.__spec__ = ModuleSpec(name, None) if name is not None else None
        monkeypatch.setitem(sys.modules, "__main__", main)
        general()
        assert len(armed) == expected


def test_without_a_store_the_endpoint_says_why_it_knows_nothing(tmp_path: Path) -> None:
    """No processes, no requests, and the reason as a sentence; the same of a directory without a store."""
    assert document(None) == {"processes": [], "requests": [], "reason": OFF}
    empty = document(tmp_path)
    assert (empty["processes"], empty["requests"]) == ([], [])
    assert empty["reason"].startswith("There is no kvobs store in ")


def test_the_endpoint_says_how_old_its_words_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was told 25 s ago says so, and a process when it last gave a sign of life, which is not as long ago."""
    second, wall = 1_000_000_000, 10**18
    ticks = [0]
    writer = StoreWriter(tmp_path, 8 << 20, "one", clock=lambda: ticks[0], wall=lambda: wall + ticks[0])
    try:
        writer.write([model.RequestStates(0, ORIGIN, 2, 4_096, 8, (("running", "", 1),), (), 0)])
        ticks[0] = 22 * second
        writer.commit()
        monkeypatch.setattr(_vllm_endpoints, "time", SimpleNamespace(time_ns=lambda: wall + 25 * second))
        told = document(tmp_path)
        assert [(one["age_s"], one["wall_ns"]) for one in told["requests"]] == [(25.0, wall)]
        assert [(one["alive"], one["heartbeat_age_s"]) for one in told["processes"]] == [(True, 3.0)]
    finally:
        writer.close()
