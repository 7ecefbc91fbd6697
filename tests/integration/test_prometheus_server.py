"""Debian's Prometheus scrapes a real process; its exemplars lead to the trace that rotel received."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvobs.catalog import prometheus_name
from kvobs.exporters import PrometheusExporter
from kvobs.exporters._exposition import encode
from tests.peers import http_get, prometheus, promtool_complaints, rotel, worker
from tests.support import wait_until
from tests.unit.test_exporter_exposition import TARGET, every_row, registry_of

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra prometheus).")
pytestmark = pytest.mark.peer


def test_exemplars_lead_from_prometheus_to_the_trace(tmp_path: Path) -> None:
    """Prometheus has the process's values, and its exemplars the trace id that rotel got over OTLP."""
    with rotel(tmp_path) as agent, worker(OTEL_EXPORTER_OTLP_ENDPOINT=agent.grpc, OTEL_SERVICE_NAME="chat") as process:
        target = process.said["url"].removeprefix("http://").removesuffix("/metrics")
        with prometheus(tmp_path, target) as server:
            wait_until(lambda: server.value('kvobs_turns_total{outcome="ok"}') == 1, what="Prometheus has the turn")
            name = "gen_ai_server_time_to_first_token_seconds"
            assert server.value(f'{name}_bucket{{le="0.005"}}') == 1
            assert server.value(f'{name}_bucket{{le="0.001"}}') == 0
            assert server.value('target_info{service_name="chat", service_instance_id="process-1"}') == 1
            found = server.api("query_exemplars", query=f"{name}_bucket", start=str(time.time() - 600),
                               end=str(time.time() + 600))
            exemplars = [exemplar["labels"] for series in found for exemplar in series["exemplars"]]
            assert exemplars == [{"trace_id": process.said["trace_id"], "span_id": process.said["span_id"]}]
            wait_until(lambda: "text_completion m" in agent.spans(), what="rotel has the span")
            assert agent.spans()["text_completion m"] == exemplars[0]["trace_id"]
            assert server.api("targets/metadata", metric=name)[0]["type"] == "histogram"
        assert process.end() == {"lost": 0}


def test_promtool_finds_nothing_to_complain_about() -> None:
    """promtool's parser and linter are silent on a scrape that has a point of every row of the catalog."""
    state = every_row()
    exporter, _ = PrometheusExporter.start(state, "127.0.0.1", 0, "process-1")
    assert exporter is not None
    try:
        body = http_get(exporter.url)[2]
    finally:
        exporter.stop()
    for row, _ in state.collect():
        assert f"# TYPE {prometheus_name(row)} {row.kind}\n".encode() in body
    assert promtool_complaints(body) == ""
    assert promtool_complaints(encode(registry_of(state, TARGET).collect(), openmetrics=False)) == ""
