"""``kvobs trace`` after a real call of a small model: what the SDK exported, from a server and from the store."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="The OpenTelemetry SDK is missing: pip install 'kvobs[otel]'.")
pytest.importorskip("opentelemetry.exporter.otlp.proto.common", reason="The OTLP exporter is missing: "
                    "pip install 'kvobs[otel]'.")
pytest.importorskip("torch", reason="torch is missing: pip install 'kvobs[torch]'.")
pytest.importorskip("transformers", reason="transformers is missing: pip install 'kvobs[torch]'.")

from tests.served_page import served, text
from tests.support import ROOT, child_environment, run_child, run_python

CALL = """
import json
import kvobs
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
memory = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(memory))
with kvobs.instrument(otlp="on"):
    import torch
    from tests.contract.tiny import llama
    model = llama()
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
from tests import otlp_traces
found = memory.get_finished_spans()
print(json.dumps({
    "v3": otlp_traces.v3(found), "id": otlp_traces.trace_id(found), "spans": [
        [span.name, span.start_time, span.end_time - span.start_time, span.parent and span.parent.span_id]
        for span in sorted(found, key=lambda span: (span.parent is not None, span.start_time))]}))
"""


def told(*arguments: str) -> list[dict[str, Any]]:
    ran = run_child([sys.executable, "-m", "kvobs", "trace", *arguments, "--json"], env=child_environment(), cwd=ROOT)
    assert (ran.returncode, ran.stderr) == (0, "")
    spans: list[dict[str, Any]] = json.loads(ran.stdout)["spans"]
    return spans


def test_a_real_call_is_the_same_from_everywhere(tmp_path: Path) -> None:
    """The newest trace of the store and the exported one have the same spans, times and parents."""
    store = str(tmp_path / "store")
    ran = run_python(CALL, KVOBS_STORE=store, KVOBS_PROMETHEUS="off", OTEL_TRACES_EXPORTER="none",
                     OTEL_METRICS_EXPORTER="none")
    assert ran.returncode == 0, ran.stderr[-2000:]
    exported = json.loads(ran.stdout.splitlines()[-1])
    wanted = [tuple(span[:3]) for span in exported["spans"]]
    assert [name.split()[0] for name, *_ in wanted] == ["text_completion", "prefill", "decode"]
    newest = told("--last", "--store", store)
    with served(text(json.dumps({"result": exported["v3"]}))) as page:
        answered = told(exported["id"], "--jaeger", page.url)
        from_both = told("--last", "--store", store, "--jaeger", page.url)
    for spans in (newest, answered, from_both):
        assert [(one["name"], one["start_ns"], one["duration_ns"]) for one in spans] == wanted
        assert [one["parent"] for one in spans] == [None, 0, 0]
