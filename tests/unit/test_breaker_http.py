"""An operator's word to the breaker over real HTTP, and what is refused on the way."""

from __future__ import annotations

import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="pip install 'kvobs[prometheus]' brings prometheus_client.")

from kvobs.breaker import Protection
from kvobs.breaker._operator import token_of
from kvobs.config import Config
from kvobs.exporters import PrometheusExporter
from kvobs.exporters._control import allowed_host
from kvobs.metrics import Metrics
from tests.support import wait_until

SECOND = 10**9
TOKEN = "0123456789abcdef-test"
POLICY = 'name = "load"\nescalate = "1s"\njitter = 0\n' + "".join(
    f'[[level]]\nany = [{{ signal = "app.load", above = {limit} }}]\n' for limit in (1, 2, 3))
JSON = {"Content-Type": "application/json"}


class Served:
    """A process's breaker behind its endpoint; the drain thread is the test's own."""

    def __init__(self, directory: Path, token: str = TOKEN, store: Path | None = None) -> None:
        (directory / "policy.toml").write_text(POLICY)
        self.protection = Protection(Config(store=store, breaker="observe", control_token=token,
                                            breaker_policy=str(directory / "policy.toml")), "one", Metrics(), list)
        control = self.protection.operator()
        exporter, _ = PrometheusExporter.start(Metrics(), "127.0.0.1", 0, "one", control)
        assert exporter is not None
        self.exporter, self.port, self.now = exporter, int(exporter.url.rsplit(":", 1)[1].split("/")[0]), 0
        self.tick()

    def tick(self) -> None:
        self.now += SECOND
        self.protection.follow(self.now, [], [], False)

    @property
    def level(self) -> int:
        assert self.protection.breaker is not None
        return max(self.protection.breaker.levels().values())

    def ask(self, method: str, path: str, body: bytes | None = None,
            headers: dict[str, str] | None = None) -> tuple[int, Any, dict[str, str]]:
        """Status, document and headers of one request; a body is JSON unless the headers say otherwise."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            client.request(method, path, body, headers or {})
            answer = client.getresponse()
            data = answer.read()
            assert answer.headers["Content-Type"] == "application/json"
            return answer.status, json.loads(data) if data else None, dict(answer.headers)
        finally:
            client.close()

    def command(self, path: str, body: bytes | None, token: str = TOKEN, **headers: str) -> tuple[int, Any]:
        given = JSON | {"Authorization": f"Bearer {token}"} | {
            name.replace("_", "-"): value for name, value in headers.items()}
        status, document, _ = self.ask("POST", path, body, given)
        return status, document

    def stop(self) -> None:
        self.exporter.stop()
        self.protection.stop(self.now)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    found.stop()


def test_an_operator_holds_a_level_gives_it_back_and_resets(served: Served) -> None:
    """What is posted takes effect with the next ticks, and the status says so."""
    status, said = served.command("/breaker/hold", b'{"level": 2}')
    assert (status, said["taken"]) == (202, {"hold": 2})
    assert served.level == 0
    served.tick()
    served.tick()
    assert served.level == 2
    _, document, _ = served.ask("GET", "/breaker")
    assert (document["process"], document["mode"], document["policy"]) == ("one", "observe", "load")
    scope = document["scopes"]["process"]
    assert (scope["level"], scope["held"]) == (2, 2)
    assert [(one["name"], one["phase"]) for one in scope["levels"]] == [
        ("reorganise", "open"), ("offload", "open"), ("degrade", "closed")]
    assert served.command("/breaker/hold", b'{"level": null}')[0] == 202
    served.tick()
    assert served.ask("GET", "/breaker")[1]["scopes"]["process"]["held"] is None
    assert served.command("/breaker/reset", None, Content_Length="0")[0] == 202
    served.tick()
    assert served.level == 0


def test_the_status_gives_no_secret_and_needs_none(served: Served) -> None:
    """Without a token the status is answered, uncached, and neither the token nor a path is in it."""
    status, document, headers = served.ask("GET", "/breaker")
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert TOKEN not in json.dumps(document)
    assert "/" not in json.dumps(document)


HOLD = b'{"level": 1}'
REFUSED: dict[str, tuple[int, str, bytes | None, dict[str, str]]] = {
    "no token": (401, "/breaker/hold", HOLD, {"Authorization": ""}),
    "a wrong token": (401, "/breaker/hold", HOLD, {"Authorization": "Bearer " + TOKEN[:-1]}),
    "a token that goes on": (401, "/breaker/hold", HOLD, {"Authorization": f"Bearer {TOKEN}x"}),
    "another scheme": (401, "/breaker/hold", HOLD, {"Authorization": f"Basic {TOKEN}"}),
    "bytes for a token": (401, "/breaker/hold", HOLD, {"Authorization": "Bearer \xff\xfe"}),
    "a name that is made to resolve here": (403, "/breaker/hold", HOLD, {"Host": "evil.example"}),
    "such a name with the port": (403, "/breaker/hold", HOLD, {"Host": "evil.example:9464"}),
    "a host that begins right": (403, "/breaker/hold", HOLD, {"Host": "127.0.0.1.evil.example"}),
    "the address that means all": (403, "/breaker/hold", HOLD, {"Host": "0.0.0.0"}),
    "another origin": (403, "/breaker/hold", HOLD, {"Origin": "http://evil.example"}),
    "another port's origin": (403, "/breaker/hold", HOLD, {"Origin": "http://127.0.0.1:3000"}),
    "the origin null": (403, "/breaker/hold", HOLD, {"Origin": "null"}),
    "a form": (415, "/breaker/hold", HOLD, {"Content-Type": "application/x-www-form-urlencoded"}),
    "plain text": (415, "/breaker/hold", HOLD, {"Content-Type": "text/plain"}),
    "a large body": (413, "/breaker/hold", b'{"level": 1' + b" " * 4_096 + b"}", {}),
    "a very large body": (413, "/breaker/hold", b" " * 60_000, {}),
    "chunks": (411, "/breaker/hold", HOLD, {"Transfer-Encoding": "chunked"}),
    "no number of bytes": (411, "/breaker/hold", HOLD, {"Content-Length": "-1"}),
    "no JSON": (400, "/breaker/hold", b'{"level": ', {}),
    "nested JSON": (400, "/breaker/hold", b"[" * 4_000, {}),
    "no level": (400, "/breaker/hold", b"{}", {}),
    "level 4": (400, "/breaker/hold", b'{"level": 4}', {}),
    "a level below none": (400, "/breaker/hold", b'{"level": -1}', {}),
    "a huge level": (400, "/breaker/hold", b'{"level": 1' + b"0" * 400 + b"}", {}),
    "a word": (400, "/breaker/hold", b'{"level": "1"}', {}),
    "true": (400, "/breaker/hold", b'{"level": true}', {}),
    "a fraction": (400, "/breaker/hold", b'{"level": 1.5}', {}),
    "something else": (400, "/breaker/hold", b'{"level": 1, "scope": "cuda:0"}', {}),
    "not UTF-8": (400, "/breaker/hold", b'{"\xff": 1}', {}),
    "a reset of something": (400, "/breaker/reset", b'{"level": 1}', {}),
    "no such path": (404, "/breaker/open", HOLD, {}),
    "a post to the status": (405, "/breaker", HOLD, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_attacks_and_mistakes_are_refused(served: Served, name: str) -> None:
    """Each is answered with its status and one sentence, and nothing is held."""
    expected, path, body, changed = REFUSED[name]
    headers = JSON | {"Authorization": f"Bearer {TOKEN}"} | changed
    status, document, _ = served.ask("POST", path, body, headers)
    assert (status, list(document)) == (expected, ["error"])
    assert document["error"].endswith(".")
    assert TOKEN not in document["error"]
    served.tick()
    assert served.level == 0


def test_pages_of_other_origins_cannot_even_read(served: Served) -> None:
    """The status is refused to a foreign host or origin; the server's own origin may ask and command."""
    assert served.ask("GET", "/breaker", headers={"Host": "evil.example"})[0] == 403
    assert served.ask("GET", "/breaker", headers={"Origin": "http://evil.example"})[0] == 403
    own = f"http://127.0.0.1:{served.port}"
    assert served.ask("GET", "/breaker", headers={"Origin": own})[0] == 200
    assert served.command("/breaker/hold", HOLD, Origin=own)[0] == 202


@pytest.mark.parametrize(("method", "path", "allowed"), [
    ("GET", "/breaker/hold", "POST"), ("HEAD", "/breaker/reset", "POST"), ("PUT", "/breaker/hold", "POST"),
    ("DELETE", "/breaker", "GET, HEAD"), ("OPTIONS", "/breaker/hold", "POST")])
def test_other_methods_are_refused_with_what_is_allowed(served: Served, method: str, path: str, allowed: str) -> None:
    """405 with Allow; a preflight request gets no permission."""
    status, _, headers = served.ask(method, path)
    assert (status, headers["Allow"]) == (405, allowed)
    assert not [name for name in headers if name.lower().startswith("access-control")]


def test_without_store_and_token_nothing_can_be_commanded(tmp_path: Path) -> None:
    """An empty token is no token: not even an empty one is taken."""
    served = Served(tmp_path, token="")
    try:
        for token in ("", " ", TOKEN):
            assert served.command("/breaker/hold", HOLD, token)[0] == 403
        assert served.ask("GET", "/breaker")[0] == 200
    finally:
        served.stop()


def test_the_token_beside_the_store_is_its_owner_s_alone(tmp_path: Path) -> None:
    """It is made once, random, with mode 0600, opens the door, and is the same for the next process of that store."""
    served = Served(tmp_path, token="", store=tmp_path / "store")
    try:
        file = tmp_path / "store" / "control-token"
        token = file.read_text().strip()
        assert (file.stat().st_mode & 0o777, len(token) >= 43) == (0o600, True)
        assert served.command("/breaker/hold", HOLD, token)[0] == 202
        assert served.command("/breaker/hold", HOLD, TOKEN)[0] == 401
        assert token_of(tmp_path / "store") == token
        assert token_of(tmp_path / "other") != token
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["control-token"]
    finally:
        served.stop()


@pytest.mark.parametrize("damage", ["readable", "short", "link", "pipe", "folder"])
def test_a_token_that_is_none_is_refused_and_nothing_waits(tmp_path: Path, damage: str,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    """A file that others may read, with too few characters, a link, a pipe or a folder: no commands, and it is said."""
    store = tmp_path / "store"
    store.mkdir()
    file = store / "control-token"
    if damage in ("readable", "short"):
        file.write_text("x" * (30 if damage == "readable" else 15))
        file.chmod(0o640 if damage == "readable" else 0o600)
    elif damage == "link":
        (tmp_path / "elsewhere").write_text(TOKEN)
        file.symlink_to(tmp_path / "elsewhere")
    elif damage == "pipe":
        os.mkfifo(file, 0o600)
    else:
        file.mkdir(0o600)
    served = Served(tmp_path, token="", store=store)
    try:
        assert "no commands to the breaker are taken over HTTP" in caplog.text
        assert served.command("/breaker/hold", HOLD, "x" * 30)[0] == 403
    finally:
        served.stop()


def test_too_many_commands_are_refused_and_the_last_one_taken_wins(served: Served) -> None:
    """Eight clients at once give ten commands each between two ticks: 64 are taken, the others are told to come back,
    and the breaker stands where one of them put it.
    """
    told: list[int] = []

    def client() -> None:
        for _ in range(10):
            told.append(served.command("/breaker/hold", HOLD)[0])

    clients = [threading.Thread(target=client) for _ in range(8)]
    for one in clients:
        one.start()
    for one in clients:
        one.join(60)
    assert (told.count(202), told.count(503)) == (64, 16)
    served.tick()
    assert served.level == 1
    assert served.command("/breaker/hold", b'{"level": 0}')[0] == 202


def test_a_process_without_a_breaker_says_so() -> None:
    """/breaker is 404 with the setting that would give one; the metrics are served all the same."""
    exporter, _ = PrometheusExporter.start(Metrics(), "127.0.0.1", 0)
    assert exporter is not None
    client = http.client.HTTPConnection("127.0.0.1", int(exporter.url.rsplit(":", 1)[1].split("/")[0]), timeout=10)
    try:
        client.request("GET", "/breaker")
        answer = client.getresponse()
        assert (answer.status, "KVOBS_BREAKER=observe" in json.loads(answer.read())["error"]) == (404, True)
    finally:
        client.close()
        exporter.stop()


@pytest.mark.parametrize(("header", "configured", "local", "allowed"), [
    ("127.0.0.1:9464", "127.0.0.1", "127.0.0.1", True), ("LocalHost:1", "127.0.0.1", "127.0.0.1", True),
    ("127.8.8.8", "127.0.0.1", "127.0.0.1", True), ("[::1]:9464", "::1", "::1", True),
    ("10.0.0.5:9464", "0.0.0.0", "10.0.0.5", True), ("10.0.0.5", "::", "::ffff:10.0.0.5", True),
    ("metrics.internal:9464", "metrics.internal", "10.0.0.5", True), ("10.0.0.5", "10.0.0.5", "10.0.0.5", True),
    ("10.0.0.6", "0.0.0.0", "10.0.0.5", False), ("0.0.0.0", "0.0.0.0", "127.0.0.1", False),
    ("[::]", "::", "::1", False), ("evil.example", "0.0.0.0", "10.0.0.5", False), ("localhost.", "x", "::1", False),
    ("", "127.0.0.1", "127.0.0.1", False), ("user@localhost", "localhost", "127.0.0.1", False),
    ("localhost:9464:1", "localhost", "127.0.0.1", False), ("[127.0.0.1", "127.0.0.1", "127.0.0.1", False)])
def test_hosts(header: str, configured: str, local: str, allowed: bool) -> None:
    """Loopback, the configured host and the address that was reached are allowed, other names and addresses are not."""
    assert allowed_host(header, configured, local) is allowed


def test_a_client_that_stops_sending_holds_nobody_up(served: Served) -> None:
    """While a body is awaited that does not come, others are served."""
    slow = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        slow.putrequest("POST", "/breaker/hold")
        for name, value in (JSON | {"Authorization": f"Bearer {TOKEN}", "Content-Length": "12"}).items():
            slow.putheader(name, value)
        slow.endheaders(b'{"lev')
        wait_until(lambda: served.command("/breaker/hold", HOLD)[0] == 202, what="another command is taken")
    finally:
        slow.close()
