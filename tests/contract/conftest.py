"""The transformers source alone, with what it publishes in lists: no drain thread, exporter or store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvobs import model
from kvobs.bus import Bus
from kvobs.config import Config


class Watch:
    """An installed source; what was seen since the last look, by type."""

    def __init__(self, tracer: Callable[[], Any], **settings: Any) -> None:
        from kvobs.sources import Wiring
        from kvobs.sources.transformers import TransformersSource

        self.bus = Bus(1_000_000)
        self.source = TransformersSource(Wiring(Config(**settings), self.bus, tracer))
        self.source.install(self.bus.publish)

    def events(self) -> list[Any]:
        """Everything since the last call; bare turns that have come to an end are closed first."""
        for event in self.source.sample(time.monotonic_ns()):
            self.bus.publish(event)
        return list(self.bus.drain())

    def of(self, *kinds: type) -> list[Any]:
        return [event for event in self.events() if isinstance(event, kinds)]

    def turns(self) -> list[Any]:
        return self.of(model.Turn)

    def turn(self) -> Any:
        """The one turn since the last look."""
        (turn,) = self.turns()
        return turn

    def close(self) -> None:
        self.source.uninstall()
        self.bus.active = False


@pytest.fixture
def spans() -> Any:
    """Where the SDK's in-memory exporter keeps finished spans."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: Any) -> Any:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider.get_tracer("test")


@pytest.fixture
def watching() -> Iterator[Callable[..., Watch]]:
    """Install the source as often as wanted; everything is uninstalled at the end."""
    from opentelemetry.trace import NoOpTracer

    made: list[Watch] = []

    def install(tracer: Any = None, **settings: Any) -> Watch:
        silent = NoOpTracer()
        made.append(Watch(lambda: tracer or silent, **settings))
        return made[-1]

    yield install
    for watch in made:
        watch.close()


@pytest.fixture
def watch(watching: Callable[..., Watch]) -> Watch:
    """The source, installed, without spans."""
    return watching()


@pytest.fixture
def deep(watching: Callable[..., Watch]) -> Watch:
    """The source with deep sampling, every decode step sampled."""
    from transformers.modeling_utils import AttentionInterface

    if not hasattr(AttentionInterface, "get_interface"):
        pytest.skip("transformers 5.0 has no place where attention could be looked at; the source says so.")
    watch = watching(deep=True, overhead_percent=100.0)
    watch.bus.deep = True
    watch.source._deep._budget = 1e9
    return watch
