"""Sessions: scopes, baggage, how ids are shown, and the numbers of turns."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import baggage, context

import kvobs
from kvobs.sessions import Names, Scope, TurnNumbers, current, session


@pytest.fixture
def in_baggage() -> object:
    """Run a call with entries in OpenTelemetry's baggage."""
    def run(entries: dict[str, object]) -> Scope | None:
        found = context.get_current()
        for key, value in entries.items():
            found = baggage.set_baggage(key, value, found)
        token = context.attach(found)
        try:
            return current()
        finally:
            context.detach(token)

    return run


def test_without_a_scope_there_is_no_session() -> None:
    """No block and no baggage: nobody is named."""
    assert current() is None


def test_blocks_nest_and_end() -> None:
    """The innermost block is in force, and each end brings back the one around it, also after an exception."""
    with session("outer", priority="critical") as outer:
        assert outer == current() == Scope("outer", "critical")
        with contextlib.suppress(RuntimeError), session("inner"):
            assert current() == Scope("inner", "normal")
            raise RuntimeError
        assert current() == outer
    assert current() is None


def test_the_public_name_is_the_same_function() -> None:
    """``kvobs.session`` is ``kvobs.sessions.session``."""
    assert kvobs.session is session


@pytest.mark.parametrize(("id", "priority", "message"), [
    ("", "normal", r"^A session id must be a non-empty text\.$"),
    ("a", "high", r"^The session priority 'high' is unknown; allowed are critical, normal, sheddable\.$"),
])
def test_refusals(id: str, priority: str, message: str) -> None:
    """An empty id and an unknown priority are refused in one sentence before anything is set."""
    with pytest.raises(ValueError, match=message), session(id, priority=priority):  # type: ignore[arg-type]
        pass
    assert current() is None


@pytest.mark.parametrize(("entries", "scope"), [
    ({"session.id": "b1"}, Scope("b1", "normal")),
    ({"session.id": "b1", "session.priority": "sheddable"}, Scope("b1", "sheddable")),
    ({"session.id": "b1", "session.priority": "urgent"}, Scope("b1", "normal")),
    ({"session.id": ""}, None),
    ({"session.id": 7}, None),
    ({"session.priority": "critical"}, None),
])
def test_baggage_names_the_session(in_baggage: object, entries: dict[str, object], scope: Scope | None) -> None:
    """``session.id`` of the baggage names the session, with its priority where that is a known one."""
    assert in_baggage(entries) == scope  # type: ignore[operator]


def test_a_block_wins_over_baggage(in_baggage: object) -> None:
    """What the code says is stronger than what came with the request."""
    with session("code"):
        assert in_baggage({"session.id": "wire"}) == Scope("code")  # type: ignore[operator]


def test_threads_and_tasks_have_their_own_session() -> None:
    """A new thread starts without the session; concurrent tasks never see each other's."""
    with session("main"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current).result() is None
        assert pool.submit(contextvars.copy_context().run, current).result() == Scope("main")

    async def talk(name: str, turn: asyncio.Barrier) -> list[Scope | None]:
        seen = []
        with session(name):
            for _ in range(3):
                await turn.wait()
                seen.append(current())
        return [*seen, current()]

    async def both() -> list[list[Scope | None]]:
        turn = asyncio.Barrier(2)
        return await asyncio.gather(talk("a", turn), talk("b", turn))

    assert asyncio.run(both()) == [[Scope(name)] * 3 + [None] for name in ("a", "b")]


def hmac_sha256(key: bytes, message: bytes) -> str:
    """HMAC by its definition (RFC 2104), for keys of at most one block."""
    block = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(b ^ 0x36 for b in block) + message).digest()
    return hashlib.sha256(bytes(b ^ 0x5C for b in block) + inner).hexdigest()


@pytest.mark.parametrize("id", ["anna", "Änna", "a" * 500, "\udcff"])
def test_hashed_ids_are_keyed(id: str) -> None:
    """A hashed id is the first 16 hex digits of HMAC-SHA-256 under the key, and never contains the id."""
    shown = Names("hashed", b"key").shown(id)
    assert shown == hmac_sha256(b"key", id.encode("utf-8", "surrogatepass"))[:16]
    assert shown != Names("hashed", b"other").shown(id)


def test_without_a_key_each_process_draws_its_own() -> None:
    """Two unkeyed name givers disagree, so that a dictionary of ids cannot be tried; each agrees with itself."""
    one, two = Names("hashed"), Names("hashed")
    assert one.shown("anna") == one.shown("anna") != two.shown("anna")


def test_plain_and_off() -> None:
    """``plain`` shows the id, ``off`` shows nothing."""
    assert Names("plain", b"key").shown("anna") == "anna"
    assert Names("off", b"key").shown("anna") == ""


def test_turns_count_from_one_per_session() -> None:
    """Each session's turns are 1, 2, 3, whatever the others do."""
    numbers = TurnNumbers()
    assert [numbers.next(id) for id in ("a", "b", "a", "a", "b")] == [1, 1, 2, 3, 2]


def test_the_least_recently_used_session_is_forgotten() -> None:
    """Beyond the limit the session that spoke longest ago starts again at 1; the others go on."""
    numbers = TurnNumbers(limit=2)
    for id in ("a", "b", "a", "c"):
        numbers.next(id)
    assert numbers.next("a") == 3
    assert numbers.next("b") == 1


def test_turns_are_counted_once_under_threads() -> None:
    """Four threads that share a session draw every number exactly once."""
    numbers, drawn, lock = TurnNumbers(), [], threading.Lock()

    def draw() -> None:
        mine = [numbers.next("a") for _ in range(2_000)]
        with lock:
            drawn.extend(mine)

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(drawn) == list(range(1, 8_001))
