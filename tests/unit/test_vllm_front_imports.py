"""vLLM's front end comes and goes with its modules: nothing waits for an import after the source is gone."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from opentelemetry import trace

from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.sources import Wiring, _imports
from kvobs.sources.vllm import FrontEndSource


class OutputProcessor:
    """What is hooked of vLLM's."""

    def add_request(self, request: Any) -> None:
        """Nothing."""


def test_nothing_waits_for_an_import_once_the_source_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM was imported before the source, what waits for the web server's module is taken back, too."""
    name = "vllm.v1.engine.output_processor"
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules[name], "OutputProcessor", OutputProcessor, raising=False)
    waiting = {module: list(callbacks) for module, callbacks in _imports._waiting.items()}
    original = OutputProcessor.add_request
    source = FrontEndSource(Wiring(Config(), Bus(10), lambda: trace.get_tracer("kvobs")))
    source.install(lambda event: None)
    assert OutputProcessor.add_request is not original
    source.uninstall()
    assert OutputProcessor.add_request is original
    assert {module: callbacks for module, callbacks in _imports._waiting.items() if callbacks} == {
        module: callbacks for module, callbacks in waiting.items() if callbacks}
