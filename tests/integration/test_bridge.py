"""The real ``kvobs bridge``: a changing engine page in, a Prometheus endpoint and a store out, ended by signals."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvobs.store import StoreReader
from tests.peers import http_get
from tests.served_page import Page, served, text
from tests.support import child_environment, free_port, run_child, wait_until

pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (extra prometheus).")
KVOBS = [sys.executable, "-m", "kvobs", "bridge"]
SHARE = "kvobs_engine_kv_utilization_ratio"
PREEMPTIONS = "kvobs_engine_preemptions_total"


def engine(share: str, preemptions: int) -> str:
    return "".join(f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} {share}\n'
                   f'vllm:num_preemptions_total{{engine="{rank}",model_name="m"}} {preemptions + rank}\n'
                   for rank in (0, 1))


class Bridge:
    """A running bridge: where it serves, and what it wrote."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        wait_until(lambda: process.poll() is not None or "metrics at " in self.said(), what="The bridge began")
        found = re.search(r"metrics at (\S+/metrics)", self.said())
        assert found, self.said()
        self.url = found[1]

    def said(self) -> str:
        return self.log.read_text()

    def points(self, name: str) -> dict[str, float]:
        body = http_get(self.url)[2].decode()
        return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2])
                for line in body.splitlines() if line.startswith(name + "{")}

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=20)


@contextlib.contextmanager
def bridge(directory: Path, *urls: str) -> Iterator[Bridge]:
    log = directory / "bridge.log"
    scrapes = [word for url in urls for word in ("--scrape", url)]
    with log.open("w") as output:
        process = subprocess.Popen([*KVOBS, *scrapes, "--every", "0.2", "--store", str(directory / "store"),
                                    "--prometheus", "127.0.0.1:0"], stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, text=True, env=child_environment())
        try:
            yield Bridge(process, log)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def page() -> Iterator[Page]:
    with served(text(engine("0.5", 6))) as found:
        yield found


def labels(page: Page, rank: int, **own: str) -> str:
    known = {"engine": "vllm", "target": page.name, "model": "m", "ranks": f"dp={rank}"} | own
    return "{" + ",".join(f'{key}="{value}"' for key, value in sorted(known.items())) + "}"


def test_what_an_engine_says_is_served_kept_and_ended_cleanly(page: Page, tmp_path: Path) -> None:
    """Values follow the page per rank, stop when it fails, return; the store has the last ones after SIGTERM."""
    with bridge(tmp_path, page.url) as running:
        first = {labels(page, rank, pool="device"): 0.5 for rank in (0, 1)}
        wait_until(lambda: running.points(SHARE) == first, what="The page's shares are served")
        assert running.points(PREEMPTIONS) == {labels(page, 0): 6.0, labels(page, 1): 7.0}
        up = f'{{target="{page.name}"}}'
        assert running.points("kvobs_engine_up") == {up: 1.0}
        entry, = (tmp_path / "store" / "prometheus-targets").glob("*.json")
        wait_until(lambda: json.loads(entry.read_text())[0]["labels"].get("kvobs_role") == "bridge",
                   what="Prometheus is told that this is a bridge")
        page.answer = text("", status=500)
        wait_until(lambda: running.points("kvobs_engine_up") == {up: 0.0}, what="The failed scrape is told")
        assert running.points(SHARE) == {}
        assert running.points("kvobs_engine_age_seconds").keys() == {up}
        assert f"kvobs: {page.name} answered 500, not 200." in running.said()
        page.answer = text(engine("0.875", 9))
        wait_until(lambda: set(running.points(SHARE).values()) == {0.875}, what="The page's new shares are served")
        assert running.end(signal.SIGTERM) == 0
    assert "Traceback" not in running.said()
    points = StoreReader(tmp_path / "store").points("kvobs.engine.kv.utilization")
    assert points, "The store has the engine's points."


def test_an_engine_may_come_up_later(tmp_path: Path) -> None:
    """A refused connection at the start is no error: it is told, and SIGINT ends the bridge with 0."""
    name = f"127.0.0.1:{free_port()}"
    with bridge(tmp_path, f"http://{name}") as running:
        wait_until(lambda: f"kvobs: {name} cannot be reached (connection refused)." in running.said(),
                   what="The refusal is told")
        assert running.points("kvobs_engine_up") == {f'{{target="{name}"}}': 0.0}
        availability = running.points("kvobs_availability")
        assert [value for key, value in availability.items() if f'subject="scrape {name}"' in key] == [0.0]
        assert running.end(signal.SIGINT) == 0
    assert "Traceback" not in running.said()


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    """A port that was asked for and is taken is exit code 2, not another port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_child([*KVOBS, "--scrape", f"http://127.0.0.1:{free_port()}", "--store", "off", "--prometheus",
                             f"127.0.0.1:{port}"])
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        f"kvobs: The address 127.0.0.1:{port} cannot be bound; name another, or port 0 for a free one.")
