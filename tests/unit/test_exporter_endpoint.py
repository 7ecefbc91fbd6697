"""The HTTP side of the Prometheus endpoint, talked to over real sockets."""

from __future__ import annotations

import gzip
import logging
import os
import socket
import threading

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'kvobs[prometheus]' brings prometheus_client.")
from prometheus_client.parser import text_string_to_metric_families

from kvobs.exporters import PrometheusExporter
from kvobs.exporters._http import MAX_CONNECTIONS
from kvobs.metrics import Metrics
from tests.peers import http_get
from tests.support import run_python, wait_until


@pytest.fixture
def metrics() -> Metrics:
    found = Metrics()
    found.count("kvobs.self.events", (), 3)
    return found


@pytest.fixture
def exporter(metrics: Metrics) -> PrometheusExporter:
    found, fact = PrometheusExporter.start(metrics, "127.0.0.1", 0, "p1")
    assert found is not None
    assert fact.available
    yield found
    found.stop()


def _port(exporter: PrometheusExporter) -> int:
    return int(exporter.url.rsplit(":", 1)[1].split("/")[0])


def test_metrics_are_served_and_read_by_a_parser(exporter: PrometheusExporter) -> None:
    """What /metrics serves in text is what prometheus_client's parser reads: names, values and the target."""
    status, headers, body = http_get(exporter.url)
    assert status == 200
    assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = {sample.name: sample for family in text_string_to_metric_families(body.decode())
               for sample in family.samples}
    assert samples["kvobs_self_events_total"].value == 3
    assert samples["target_info"].labels == {"service_name": "unknown_service", "service_instance_id": "p1"}


def test_content_is_negotiated(exporter: PrometheusExporter) -> None:
    """Accept chooses the format and Accept-Encoding the compression."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    _, headers, plain = http_get(exporter.url, accept)
    assert headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert plain.endswith(b"# EOF\n")
    _, headers, packed = http_get(exporter.url, {**accept, "Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed) == plain


def test_only_two_paths_and_two_methods(exporter: PrometheusExporter) -> None:
    """/healthz answers, HEAD has no body, other paths are 404 and other methods 405."""
    base = exporter.url.removesuffix("/metrics")
    assert http_get(f"{base}/healthz")[::2] == (200, b"ok\n")
    status, headers, body = http_get(exporter.url, method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) == len(http_get(exporter.url)[2])
    assert http_get(f"{exporter.url}?name[]=x")[0] == 200
    assert http_get(f"{base}/")[0] == 404
    assert http_get(f"{base}/metrics/x")[0] == 404
    status, headers, _ = http_get(exporter.url, method="POST")
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_occupied_port_is_replaced_logged_once_and_said(metrics: Metrics, exporter: PrometheusExporter,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    """Where the port is taken, another is served; one warning and the fact name both."""
    with caplog.at_level(logging.WARNING, "kvobs"):
        second, fact = PrometheusExporter.start(metrics, "127.0.0.1", _port(exporter))
    assert second is not None
    try:
        assert fact.available
        assert str(_port(exporter)) in fact.reason
        assert second.url in fact.reason
        assert [record.getMessage() for record in caplog.records] == [f"kvobs: {fact.reason}"]
        assert http_get(second.url)[0] == 200
    finally:
        second.stop()


def test_an_address_of_another_machine_is_a_fact_not_an_error(metrics: Metrics) -> None:
    """Where nothing can be bound, nothing is raised: the fact says why."""
    exporter, fact = PrometheusExporter.start(metrics, "192.0.2.1", 0)
    assert exporter is None
    assert not fact.available
    assert "192.0.2.1" in fact.reason


def test_stuck_clients_do_not_lock_out_a_scrape(exporter: PrometheusExporter) -> None:
    """Twice as many silent clients as the bound leave at most that many threads, and the next scrape is answered."""
    stuck = [socket.create_connection(("127.0.0.1", _port(exporter))) for _ in range(2 * MAX_CONNECTIONS)]
    try:
        for client in stuck:
            client.sendall(b"GET /metr")
        assert http_get(exporter.url)[0] == 200
        wait_until(lambda: sum(thread.name == "kvobs-http-client" for thread in threading.enumerate())
                   <= MAX_CONNECTIONS, what="the number of client threads is bounded")
    finally:
        for client in stuck:
            client.close()


def test_rendering_that_fails_is_a_500_and_the_next_scrape_works(
        metrics: Metrics, exporter: PrometheusExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while rendering is answered with 500 and does not end the server."""
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "collect", lambda: 1 / 0)
        assert http_get(exporter.url)[0] == 500
    assert http_get(exporter.url)[0] == 200


def test_stop_frees_the_port_and_ends_the_threads(metrics: Metrics) -> None:
    """After stop the port can be bound again and no thread is left, even with a client connected."""
    exporter, _ = PrometheusExporter.start(metrics, "127.0.0.1", 0)
    assert exporter is not None
    port = _port(exporter)
    with socket.create_connection(("127.0.0.1", port)):
        exporter.stop()
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvobs-http")]


def test_a_forked_child_lets_go_of_the_socket(metrics: Metrics, exporter: PrometheusExporter) -> None:
    """After abandon in a child the parent still serves, and once it stops the child does not hold the port."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        exporter.abandon()
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"1"
        assert http_get(exporter.url)[0] == 200
        port = _port(exporter)
        exporter.stop()
        with socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        os.write(go[1], b"1")
        assert os.waitpid(child, 0)[1] == 0
        for end in (*ready, *go):
            os.close(end)


def test_without_prometheus_client_there_is_a_fact_with_the_pip_line() -> None:
    """Without prometheus_client nothing is served, nothing raised, and one sentence says what to install."""
    done = run_python(_BLOCKER.format(blocked="prometheus_client") + """
from kvobs.exporters import PrometheusExporter
from kvobs.metrics import Metrics
exporter, fact = PrometheusExporter.start(Metrics(), "127.0.0.1", 0)
assert exporter is None and not fact.available
print(fact.reason)
""")
    assert done.stderr == ""
    assert 'pip install "kvobs[prometheus]"' in done.stdout


def test_importing_the_exporters_loads_no_back_end() -> None:
    """Importing kvobs.exporters imports neither the SDK nor an OTLP exporter, prometheus_client or grpc."""
    done = run_python("""
import sys
import kvobs.exporters
print([name for name in sys.modules
       if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "prometheus_client", "grpc"))])
""")
    assert (done.stdout, done.stderr) == ("[]\n", "")


_BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "{blocked}" or name.startswith("{blocked}."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
