"""An ASGI server and applications that a test holds in its hands, message by message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from kvobs.asgi import BreakerMiddleware
from kvobs.breaker._gate import ACT, Decision
from kvobs.breaker._limits import UNLIMITED, Limits

CHAT = "/v1/chat/completions"
SECOND = 10**9
LIMITS = (UNLIMITED, Limits(max_new_tokens=100), Limits(admit=False))


class Clock:
    """Nanoseconds that go on when told."""

    def __init__(self) -> None:
        self.now_ns = SECOND

    def __call__(self) -> int:
        return self.now_ns


def decision(**changed: object) -> Decision:
    """Level 3 in mode act: normal sessions have 100 tokens, sheddable ones are refused."""
    given: dict[str, object] = {"generation": 1, "level": 3, "mode": ACT, "limits": LIMITS, "retry_after_s": 4.0,
                                "expires_ns": 10**18}
    return Decision(**(given | changed))  # type: ignore[arg-type]


class Board:
    """A board that says what the test wants."""

    def __init__(self, found: Decision | None = None) -> None:
        self.found = found

    def decision(self) -> Decision | None:
        return self.found


def guarded(app: Any, found: Decision | None, clock: Clock | None = None, **options: Any) -> BreakerMiddleware:
    """The application behind the middleware, with a decision and without chance."""
    return BreakerMiddleware(app, board=Board(found), clock=clock or Clock(), draw=lambda: 0.0, **options)


def scope(path: str = CHAT, method: str = "POST", **headers: str) -> dict[str, Any]:
    """An HTTP request; names of headers have ``_`` for ``-``."""
    given = {"content_type": "application/json"} | headers
    return {"type": "http", "method": method, "path": path, "client": ("10.0.0.1", 5),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]}


class Call:
    """One request: what the client sends, and what is sent to it."""

    def __init__(self, app: Any, request: dict[str, Any] | None = None, *bodies: bytes, leave: bool = False) -> None:
        self.scope = request if request is not None else scope()
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        bodies = bodies or (b'{"max_tokens": 500}',)
        for number, body in enumerate(bodies, 1):
            self.messages.put_nowait({"type": "http.request", "body": body, "more_body": number < len(bodies)})
        if leave:
            self.leave()
        self.receive: Callable[[], Any] = self.messages.get
        self._app = app

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def run(self) -> Call:
        await self._app(self.scope, self.receive, self.send)
        return self

    def start(self) -> asyncio.Task[Call]:
        return asyncio.create_task(self.run())

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class App:
    """An application that reads the whole body, then answers 200 with two chunks; it can be held in between."""

    def __init__(self, held: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.seen: list[tuple[Any, Any, Any]] = []
        self.messages: list[Any] = []
        self.serving: list[str] = []
        self.free = asyncio.Semaphore(0 if held else 10**6)

    async def __call__(self, given: Any, receive: Any, send: Any) -> None:
        self.seen.append((given, receive, send))
        body, more = b"", True
        while more:
            message = await receive()
            self.messages.append(message)
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        self.serving.append(dict(given["headers"]).get(b"kvobs-session", b"").decode())
        await self.free.acquire()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y")]})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two"})


def tokens(body: bytes) -> Any:
    """The limit in a chat request's body."""
    return json.loads(body)["max_tokens"]


async def until(holds: Callable[[], object]) -> None:
    """Let other tasks run until something holds."""
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0)
