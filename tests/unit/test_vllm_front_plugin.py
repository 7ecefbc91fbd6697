"""The entry point that vLLM calls in each of its processes."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from kvobs import autostart
from kvobs.plugins._vllm import INSPECTION, general
from kvobs.plugins._vllm_endpoints import OFF, document


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collects how often kvobs was armed."""
    calls: list[str] = []
    monkeypatch.setattr(autostart, "arm", lambda: calls.append("armed"))
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
