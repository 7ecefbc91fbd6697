"""A real Jaeger: what kvobs exports to it over OTLP is what ``kvobs trace`` prints from both of its APIs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="The OTLP exporter is missing: "
                    "pip install 'kvobs[otel]'.")
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from kvobs.cli import main, traces
from tests import otlp_traces
from tests.contract.test_jaeger_api import spans_as_exported, spans_as_told
from tests.support import child_environment, free_port, wait_until

NAMED = "KVOBS_TEST_JAEGER"
CONFIG = """
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines: {{traces: {{receivers: [otlp], exporters: [jaeger_storage_exporter]}}}}
  telemetry: {{metrics: {{level: none}}}}
extensions:
  jaeger_query: {{storage: {{traces: here}}, http: {{endpoint: "127.0.0.1:{query}"}},
    grpc: {{endpoint: "127.0.0.1:{grpc}"}}}}
  jaeger_storage: {{backends: {{here: {{memory: {{max_traces: 1000}}}}}}}}
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{otlp}"}}}}}}}}
exporters: {{jaeger_storage_exporter: {{trace_storage: here}}}}
"""


@pytest.fixture(scope="module")
def jaeger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of its query service and of its OTLP receiver over HTTP."""
    named = os.environ.get(NAMED, "")
    if not named:
        pytest.skip(f"{NAMED} names no Jaeger (version 2): the path of its program, or the address of its UI, of whose "
                    "host the port 4318 takes OTLP.")
    if named.startswith(("http://", "https://")):
        yield named.rstrip("/"), f"http://{urllib.parse.urlsplit(named).hostname}:4318"
        return
    query, otlp, grpc = free_port(), free_port(), free_port()
    folder = tmp_path_factory.mktemp("jaeger")
    config = folder / "jaeger.yaml"
    config.write_text(CONFIG.format(query=query, otlp=otlp, grpc=grpc))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(Path(named)), "--config", str(config)], stdout=log, stderr=log,
                                   env=child_environment())
        try:
            wait_until(lambda: process.poll() is not None or (_answers(query) and _answers(otlp)), 60, "Jaeger")
            assert process.poll() is None, (folder / "log").read_text(errors="replace")[-2000:]
            yield f"http://127.0.0.1:{query}", f"http://127.0.0.1:{otlp}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/")
        connection.getresponse().read()
        return True
    return False


def test_what_is_exported_is_printed(jaeger: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Spans, parents, times and events that Jaeger gives back over the API v3 are those that were exported to it."""
    address, otlp = jaeger
    exported = otlp_traces.exported(OTLPSpanExporter(endpoint=f"{otlp}/v1/traces"))
    wanted = otlp_traces.trace_id(exported)

    def is_whole() -> bool:
        with contextlib.suppress(traces.TraceError):
            return len(traces.fetch(address, wanted).spans) == len(exported)
        return False

    wait_until(is_whole, 30, "the trace in Jaeger")
    assert main(["trace", wanted, "--jaeger", address, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"].endswith("(API v3)")
    assert spans_as_told(told) == spans_as_exported(exported)
    assert main(["trace", wanted, "--jaeger", address]) == 0
    assert "kvobs.migration src=cpu dst=meta" in capsys.readouterr().out
    with urllib.request.urlopen(f"{address}/trace/{wanted}", timeout=10) as page:
        assert page.status == 200


def test_an_unknown_trace_is_one_sentence(jaeger: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 for a trace that Jaeger has not."""
    assert main(["trace", "1" * 32, "--jaeger", jaeger[0]]) == 2
    assert capsys.readouterr().err == f"kvobs: The Jaeger at {jaeger[0]} has no trace {'1' * 32}.\n"
