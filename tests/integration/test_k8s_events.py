"""``kvobs k8s-events`` over real HTTP: the official client, an emulator of Kubernetes, strict schemas."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_WHY = "needs kmock, kubernetes and kubernetes-validate: pip install kmock kubernetes kubernetes-validate."
kmock = pytest.importorskip("kmock", reason=f"The emulator {_WHY}")
client = pytest.importorskip("kubernetes.client", reason=f"The client {_WHY}")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=f"The schemas {_WHY}")
import yaml

from kvobs import model
from kvobs.cli import _k8s_events, main
from kvobs.cli.k8s import ApiError, Fact, Pod, Recorder, connect
from kvobs.store import StoreWriter
from tests.events import ORIGIN, turn
from tests.support import ROOT, child_environment, free_port, wait_until

VERSION = "1.31"
TRACE = "ab" * 16
SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND
RBAC = ROOT / "deploy" / "kubernetes" / "k8s-events-rbac.yaml"


class Cluster:
    """The emulator on a thread of its own, with one pod."""

    def __init__(self, address: str, emulator: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.address, self.emulator, self._loop = address, emulator, loop
        self.core = client.CoreV1Api(client.ApiClient(client.Configuration(host=address)))

    def events(self) -> list[dict[str, Any]]:
        """All events as they are stored, each of them valid."""
        found = [dict(one.raw) for (kind, _, _), one in self.emulator.objects.items() if kind.plural == "events"
                 and not one.deleted]
        for one in found:
            kubernetes_validate.validate(one, VERSION, strict=True)
        return found

    def requests(self) -> list[tuple[str, str]]:
        """Method and kind of the requests so far."""
        return [(str(one.method.value), str(one.resource.plural)) for one in self.emulator if one.resource]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    port, ready, done = free_port(), threading.Event(), asyncio.Event()
    held: dict[str, Any] = {}

    async def serve() -> None:
        async with kmock.KubernetesEmulator() as emulator, kmock.Server(emulator, host="127.0.0.1", port=port):
            for plural in ("pods", "events"):
                kind = kmock.resource("", "v1", plural)
                emulator.resources[kind] = kmock.ResourceInfo(namespaced=True)
            emulator.objects["v1/pods", "chat", "engine-0"] = {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine-0", "namespace": "chat", "uid": "u-1"}}
            held.update(emulator=emulator, loop=asyncio.get_running_loop())
            ready.set()
            await done.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield Cluster(f"http://127.0.0.1:{port}", held["emulator"], held["loop"])
    finally:
        held["loop"].call_soon_threadsafe(done.set)
        thread.join(30)


def fact(at_s: float, reason: str = "BreakerOpened", subject: str = "cpu level 1", **fields: Any) -> Fact:
    return Fact(**{"wall_ns": WALL + int(at_s * SECOND), "reason": reason, "subject": subject, "message": "It is full.",
                   "warning": True} | fields)


def recorder(cluster: Cluster, **fields: Any) -> Recorder:
    return Recorder(*connect("chat", "engine-0", None, cluster.address), **fields)


def test_the_store_s_facts_become_events(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Transitions and out-of-memory errors are valid events on the pod, with its uid, the trace and Jaeger's link."""
    now = time.time_ns()
    writer = StoreWriter(tmp_path / "store", 64 * 1024**2, "p", clock=lambda: 0, wall=lambda: now - 10 * SECOND)
    writer.write([turn(trace_id=TRACE, t_ns=4 * SECOND), model.OutOfMemory(4 * SECOND, ORIGIN, "anna", "no \x1broom"),
                  *(model.Decided(at * SECOND, "cpu", "default", "act", 1, "closed", after, "It is full.", (), (), at)
                    for at, after in ((1, "open"), (2, "half-open"), (3, "open")))])
    writer.close()
    monkeypatch.setenv("KVOBS_JAEGER_URL", "http://jaeger:16686")
    monkeypatch.setenv("POD_NAMESPACE", "chat")
    assert main(["k8s-events", "--pod", "engine-0", "--server", cluster.address, "--store", str(tmp_path / "store"),
                 "--once", "600"]) == 0
    assert capsys.readouterr().out == "3 events were written.\n"
    found = {one["reason"]: one for one in cluster.events()}
    assert {reason: (one["count"], one["type"]) for reason, one in found.items()} == {
        "BreakerOpened": (2, "Warning"), "BreakerProbing": (1, "Normal"), "OutOfMemory": (1, "Warning")}
    assert all(one["involvedObject"] == {"apiVersion": "v1", "kind": "Pod", "namespace": "chat", "name": "engine-0",
                                         "uid": "u-1"} for one in found.values())
    failed = found["OutOfMemory"]
    assert failed["message"] == (r"Out of memory on cpu: no \x1broom Trace " + TRACE
                                 + f" (http://jaeger:16686/trace/{TRACE}).")
    assert failed["metadata"]["annotations"] == {"kvobs/trace-id": TRACE}
    listed = cluster.core.list_namespaced_event("chat").items
    assert {one.reason: one.count for one in listed} == {reason: one["count"] for reason, one in found.items()}


def test_the_same_again_is_one_event_with_a_count(cluster: Cluster) -> None:
    """Repeats are merged, written ever more rarely, and after ten quiet minutes are an event of their own."""
    mine = recorder(cluster)
    for at in range(600):
        mine.add([fact(at)])
        mine.write(WALL + at * SECOND)
    assert [(one["count"] > 300, one["firstTimestamp"][:19]) for one in cluster.events()] == [
        (True, "2023-11-14T22:13:20")]
    assert cluster.requests().count(("PATCH", "events")) <= 6
    mine.write(WALL + 2_000 * SECOND)
    assert [one["count"] for one in cluster.events()] == [600]
    assert mine.pending == 0
    mine.add([fact(3_000)])
    mine.write(WALL + 3_000 * SECOND)
    assert sorted(one["count"] for one in cluster.events()) == [1, 600]


def test_an_api_that_fails_is_tried_again_ever_later(cluster: Cluster) -> None:
    """While the API answers 503 nothing is lost, and the waits between attempts double up to a minute."""
    mine = recorder(cluster)
    for method in ("post", "patch"):
        cluster.emulator[method] << 503
    mine.add([fact(0)])
    attempts = []
    for at in range(200):
        before = len(cluster.requests())
        mine.write(WALL + at * SECOND)
        attempts += [at] if len(cluster.requests()) > before else []
    assert attempts == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    assert (mine.pending, "503" in mine.problem) == (1, True)


def test_an_answer_that_was_lost_makes_no_second_event(cluster: Cluster) -> None:
    """Where the API kept an event and its answer failed, the next attempt finds it and brings it up to date."""
    mine = recorder(cluster)
    cluster.emulator["post"] << 503  # the emulator keeps the object all the same
    for at in (0, 5):
        mine.add([fact(at)])
        mine.write(WALL + at * SECOND)
    assert [one["count"] for one in cluster.events()] == [2]
    assert (mine.pending, mine.problem) == (0, "")


def test_at_the_end_what_waits_for_its_time_is_written(cluster: Cluster) -> None:
    """A count within the spacing, and an event within the wait after a failure; a failure then is the last attempt."""
    mine = recorder(cluster)
    mine.add([fact(0)])
    mine.write(WALL)
    mine.add([fact(1)])
    assert (mine.write(WALL + SECOND), mine.pending) == (0, 1)
    assert (mine.flush(WALL + SECOND), mine.pending) == (1, 0)
    assert [one["count"] for one in cluster.events()] == [2]
    for method in ("post", "patch"):
        cluster.emulator[method] << 503
    mine.add([fact(2, subject=f"s{at}") for at in range(5)])
    assert mine.write(WALL + 2 * SECOND) == 0
    before = len(cluster.requests())
    assert mine.write(WALL + 2 * SECOND) == 0  # it waits
    assert len(cluster.requests()) == before
    assert (mine.flush(WALL + 2 * SECOND), mine.pending) == (0, 5)
    assert [method for method, _ in cluster.requests()[before:]] == ["POST", "PATCH"]  # the emulator kept the first


def test_the_annotation_is_the_trace_that_the_message_names(cluster: Cluster) -> None:
    """A repeat changes the annotation with the message; where it has no trace, none is left."""
    mine = recorder(cluster)
    for at, trace in enumerate((TRACE, "cd" * 16, "", TRACE)):
        mine.add([fact(60 * at, trace_id=trace)])
        mine.flush(WALL + 60 * at * SECOND)
        (event,) = cluster.events()
        assert (event["metadata"].get("annotations") or {}) == ({"kvobs/trace-id": trace} if trace else {})
        assert (f"Trace {trace}" if trace else "It is full.") in event["message"]


def test_an_event_that_expired_is_written_anew(cluster: Cluster) -> None:
    """Where the API no longer has the event, it is created with the whole count."""
    mine = recorder(cluster)
    mine.add([fact(0)])
    mine.write(WALL)
    (known,) = cluster.events()
    cluster.core.delete_namespaced_event(known["metadata"]["name"], "chat")
    mine.add([fact(60)])
    mine.write(WALL + 60 * SECOND)
    assert [one["count"] for one in cluster.events()] == [2]


def test_no_more_events_than_the_bound(cluster: Cluster) -> None:
    """Of a hundred subjects at once 64 become events; the others are counted; long messages keep within the bound."""
    mine = recorder(cluster)
    mine.add([fact(0, subject=f"s{at}", message="ä" * 5_000, trace_id=TRACE) for at in range(100)])
    mine.write(WALL)
    assert (len(cluster.events()), mine.dropped) == (64, 36)
    assert all(len(one["message"].encode()) <= 1024 and TRACE in one["message"] for one in cluster.events())


def test_a_pod_or_an_api_that_is_not_there_is_one_sentence(cluster: Cluster, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one sentence for an unknown pod, a dead address, and outside a cluster."""
    (tmp_path / "store").mkdir()
    with pytest.raises(ApiError, match=r"answered 404"):
        connect("chat", "nobody", None, cluster.address)
    dead = f"http://127.0.0.1:{free_port()}"
    for arguments, sentence in ((["--server", dead], "cannot be reached"), ([], "is not known"),
                                (["--kubeconfig", str(tmp_path / "none")], "is not known")):
        code = main(["k8s-events", "--pod", "p", "--namespace", "n", "--store", str(tmp_path / "store"), *arguments])
        err = capsys.readouterr().err
        assert (code, err.count("\n")) == (2, 1)
        assert sentence in err


@pytest.mark.parametrize("text", ["a: [1", "- 1", "5", "\x00", "clusters: 5\ncurrent-context: x\ncontexts: [1]\n"])
def test_a_kubeconfig_that_is_none_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                   text: str) -> None:
    """Broken YAML, and YAML of another shape."""
    (tmp_path / "store").mkdir()
    (tmp_path / "config").write_text(text)
    assert main(["k8s-events", "--pod", "p", "--namespace", "n", "--store", str(tmp_path / "store"), "--kubeconfig",
                 str(tmp_path / "config")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvobs: The ")
    assert (err.count("\n"), "Traceback" in err) == (1, False)


def test_the_role_is_valid_and_allows_just_what_is_asked(cluster: Cluster) -> None:
    """The manifest passes the strict schemas, and its rules are the verbs that the tests above saw."""
    documents = list(yaml.safe_load_all(RBAC.read_text(encoding="utf-8")))
    for document in documents:
        kubernetes_validate.validate(document, VERSION, strict=True)
    rules = {(resource, verb) for rule in documents[1]["rules"] for resource in rule["resources"]
             for verb in rule["verbs"]}
    mine = recorder(cluster)
    for at in (0, 60):
        mine.add([fact(at)])
        mine.write(WALL + at * SECOND)
    verbs = {"GET": "get", "POST": "create", "PATCH": "patch"}
    assert {(kind, verbs[method]) for method, kind in cluster.requests()} == rules


def test_the_command_follows_the_store_until_it_is_ended(cluster: Cluster, tmp_path: Path) -> None:
    """What happens after its start becomes an event, in a store that came later, and on SIGTERM it ends with 0."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvobs", "k8s-events", "--pod", "engine-0", "--namespace", "chat", "--every", "1",
         "--server", cluster.address, "--store", str(tmp_path / "store")], cwd=ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment())
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"Events of {tmp_path / 'store'} go to the pod chat/engine-0.\n"
        # Only now is there a store; that there was none is said once at most.
        writer = StoreWriter(tmp_path / "store", 64 * 1024**2, "p")
        writer.write([model.OutOfMemory(time.monotonic_ns(), ORIGIN, "anna", "no room")])
        writer.close()
        wait_until(cluster.events, what="the event")
        # In the moment of the end a second one, within the spacing: it raises the count all the same.
        later = StoreWriter(tmp_path / "store", 64 * 1024**2, "q")
        later.write([model.OutOfMemory(time.monotonic_ns(), ORIGIN, "anna", "no room")])
        later.close()
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=30)[0].splitlines()
        assert said in ([], [f"kvobs: There is no store at {tmp_path / 'store'}; name a kvobs store or a directory of "
                             "stores. 0 events wait."])
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
    assert [(one["reason"], one["count"]) for one in cluster.events()] == [("OutOfMemory", 2)]


@pytest.mark.parametrize("step_s", [-3_600, 3_600])
def test_an_engine_whose_clock_is_another_is_told(cluster: Cluster, tmp_path: Path, step_s: int) -> None:
    """The clock was set between the engine's start and the command's: what happens still becomes an event."""
    writer = StoreWriter(tmp_path / "store", 64 * 1024**2, "p", wall=lambda: time.time_ns() + step_s * SECOND)
    writer.write([model.OutOfMemory(time.monotonic_ns(), ORIGIN, "anna", "before")])
    writer.commit()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvobs", "k8s-events", "--pod", "engine-0", "--namespace", "chat", "--every", "3600",
         "--server", cluster.address, "--store", str(tmp_path / "store")], cwd=ROOT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment())
    try:
        assert process.stdout is not None
        process.stdout.readline()
        writer.write([model.OutOfMemory(time.monotonic_ns(), ORIGIN, "anna", "after")])
        writer.close()
        process.send_signal(signal.SIGTERM)
        assert (process.communicate(timeout=30)[0], process.returncode) == ("", 0)
    finally:
        process.kill()
        process.wait()
    assert [one["message"] for one in cluster.events()] == ["Out of memory on cpu: after"]


def test_an_api_that_hangs_holds_up_the_end_for_a_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              capsys: pytest.CaptureFixture[str]) -> None:
    """The last writes have a limit, and it is said what was not written."""
    hung = threading.Event()

    class Hanging:
        def create(self, body: dict[str, Any]) -> None:
            hung.wait(30)

        def patch(self, name: str, change: dict[str, Any]) -> None:
            hung.wait(30)

    mine = Recorder(Hanging(), Pod("chat", "engine-0"))
    mine.add([fact(0)])
    monkeypatch.setattr(_k8s_events, "LAST_S", 0.05)
    ended = threading.Event()
    ended.set()
    monkeypatch.setattr(_k8s_events, "_ended", lambda: contextlib.nullcontext(ended))
    StoreWriter(tmp_path / "store", 64 * 1024**2, "p").close()
    try:
        _k8s_events._follow(tmp_path / "store", mine, 1, "Begun.")
    finally:
        hung.set()
    assert capsys.readouterr().err == "kvobs: The last look took more than 0.05 s; 1 events were not written.\n"
