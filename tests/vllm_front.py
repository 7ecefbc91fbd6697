"""vLLM's front end without an engine, for ``tests/contract/test_vllm_frontend.py``: prints what it saw as JSON.

Runs in the Python that has vLLM.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvobs.bus import Bus
from kvobs.config import Config
from kvobs.model import Event, HookFailed, ProcessRole
from kvobs.sources import Wiring
from kvobs.sources.vllm import FrontEndSource

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PHASES = json.dumps([["queued", 100, 200, []], ["decode", 200, 300, [["kvobs.preempted", 250, {"cause": "blocks"}]]]])
PLACES = {"vllm.v1.engine.output_processor": ("OutputProcessor",), "vllm.v1.engine.async_llm": ("AsyncLLM",),
          "vllm.v1.engine.llm_engine": ("LLMEngine",), "vllm.v1.executor.abstract": ("Executor",),
          "vllm.v1.worker.worker_base": ("WorkerBase",), "vllm.v1.engine.core": ("EngineCore",),
          "vllm.v1.engine.utils": ("CoreEngineProcManager",), "starlette.applications": ("Starlette",),
          "vllm.tracing.otel": ()}


def identities() -> dict[str, int]:
    """Every attribute of the modules and classes that kvobs may touch, by identity."""
    found = {}
    for name, classes in PLACES.items():
        module = importlib.import_module(name)
        for owner in (module, *(getattr(module, one) for one in classes)):
            found |= {f"{name}.{owner.__name__}.{key}": id(value) for key, value in vars(owner).items()}
    return found


def traced(exporter: InMemorySpanExporter, headers: dict[str, str] | None) -> list[dict[str, Any]]:
    """The spans that vLLM's ``do_tracing`` leaves of a request with these headers."""
    engine, stats = importlib.import_module("vllm.v1.engine"), importlib.import_module("vllm.v1.metrics.stats")
    processor = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
    iteration = stats.IterationStats()
    iteration.iteration_timestamp = 2.0
    state = SimpleNamespace(stats=stats.RequestStateStats(arrival_time=1.0), prompt_token_ids=[1, 2],
                            prompt_embeds=None, external_req_id="r", top_p=None, max_tokens_param=7, temperature=None,
                            n=None)
    output = engine.EngineCoreOutput("r", [], trace_headers=headers)
    exporter.clear()
    processor.do_tracing(processor.__new__(processor), output, state, iteration)
    return [{"name": span.name, "id": span.context.span_id, "parent": span.parent and span.parent.span_id,
             "trace": span.context.trace_id, "start": span.start_time, "attributes": dict(span.attributes or {}),
             "kind": span.kind.name, "scope": span.instrumentation_scope.name,
             "events": [event.name for event in span.events]} for span in exporter.get_finished_spans()]


def main() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    before = identities()
    headers = {"traceparent": PARENT, "kvobs-spans": "frontend", "kvobs-phases": PHASES}
    seen: dict[str, Any] = {"plain": [traced(exporter, {"traceparent": PARENT}), traced(exporter, None)]}
    events: list[Event] = []
    source = FrontEndSource(Wiring(Config(), Bus(100), lambda: trace.get_tracer("kvobs")))
    source.install(events.append)
    seen["availability"] = {fact.subject: fact.reason for fact in source.availability()}
    seen["patched"] = sorted(name for name, number in identities().items() if before[name] != number)
    seen["observed"] = [traced(exporter, headers), traced(exporter, {"kvobs-spans": "frontend"})]
    parallel = importlib.import_module("vllm.config").ParallelConfig()
    executor = importlib.import_module("vllm.v1.executor.abstract").Executor
    refuse(lambda: executor.__init__(SimpleNamespace(), SimpleNamespace(parallel_config=parallel)))
    worker = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    refuse(lambda: worker.__init__(SimpleNamespace(), SimpleNamespace(parallel_config=parallel), 0, 0, ""))
    seen["roles"] = [[event.role, event.ranks] for event in events if isinstance(event, ProcessRole)]
    seen["broken"] = traced(exporter, {**headers, "kvobs-phases": "{"})
    seen["after"] = {fact.subject: fact.reason for fact in source.availability()}
    seen["failures"] = [event.hook for event in events if isinstance(event, HookFailed)]
    source.uninstall()
    seen["left"] = sorted(name for name, number in identities().items() if before.get(name) != number)
    json.dump(seen, sys.stdout)


def refuse(construct: Callable[[], None]) -> None:
    """Begin to make something whose configuration is none: it raises, after kvobs has looked."""
    try:
        construct()
    except AttributeError:
        return
    raise AssertionError("vLLM made something of nothing.")


if __name__ == "__main__":
    main()
