"""A request over ASGI as the gate sees it: whose it is, its body read ahead, and the answers that the gate gives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry import baggage
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context

from kvobs import sessions
from kvobs.breaker._admission import Admission, Ticket
from kvobs.breaker._degrade import within
from kvobs.breaker._history import Count
from kvobs.breaker._limits import Limits
from kvobs.sessions import PRIORITIES, Priority
from kvobs.sessions._scope import BAGGAGE_ID, BAGGAGE_PRIORITY

if TYPE_CHECKING:
    from kvobs.breaker._trial import Trial

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]

SESSION, PRIORITY = b"kvobs-session", b"kvobs-priority"
MOST_BODY = 1_048_576  # bytes that are read ahead; a longer body passes as it is
MOST_CHARACTERS = 256  # of a session's name, which comes from anybody
_propagator = W3CBaggagePropagator()


def whose(scope: Scope) -> tuple[str | None, Priority]:
    """Session (None where none is named) and priority of a request, by its headers, else by its baggage."""
    headers = dict(scope["headers"])
    name, priority = _text(headers.get(SESSION)), _text(headers.get(PRIORITY))
    if b"baggage" in headers:
        entries = _propagator.extract({"baggage": headers[b"baggage"].decode("latin-1")}, Context())
        name = name or str(baggage.get_baggage(BAGGAGE_ID, entries) or "")
        priority = priority or str(baggage.get_baggage(BAGGAGE_PRIORITY, entries) or "")
    return name[:MOST_CHARACTERS] or None, priority if priority in PRIORITIES else "normal"


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "backslashreplace").strip()


class Visit:
    """One request on its way to the application."""

    def __init__(self, scope: Scope, receive: Receive, admission: Admission) -> None:
        self.scope = scope
        self.admission = admission
        self.name, self.priority = whose(scope)
        client = scope.get("client")
        self.line = self.name or f"client {client[0] if client else ''}"  # whom it takes turns with others for
        self.mode = "none"
        self.ticket: Ticket | None = None
        self.trial: Trial | None = None  # it is a probe
        self.raised = False
        self.answer: tuple[int, bytes, Sequence[Header]] | None = None
        self.gone = False
        self.complete = False
        self._source = receive
        self._read: list[Message] = []
        self._pending: asyncio.Task[Message] | None = None
        self._touched = False
        self._marks: tuple[Header, ...] = ()

    # -- what the client sends -------------------------------------------------------------------------

    @property
    def receive(self) -> Receive:
        """What the application is given: what was read ahead, then what is to come."""
        receive = self._replay if self._touched else self._source
        return receive if self.trial is None else self.trial.receiving(receive)

    async def _replay(self) -> Message:
        if self._read:
            return self._read.pop(0)
        pending, self._pending = self._pending, None
        return await (self._source() if pending is None else pending)

    async def read_ahead(self) -> None:
        """Read the body, up to ``MOST_BODY`` bytes."""
        self._touched, size = True, 0
        while not self.complete and not self.gone and size <= MOST_BODY:
            message = await self._source()
            self._read.append(message)
            size += len(message.get("body", b""))
            self.gone = message["type"] == "http.disconnect"
            self.complete = not self.gone and not message.get("more_body", False)

    async def stays_until(self, done: asyncio.Future[None]) -> None:
        """Return once ``done`` is, or the client has left; the latter is seen only after a body that is complete."""
        while not done.done() and not self.gone:
            if self.complete and self._pending is None:
                self._pending = asyncio.ensure_future(self._next())
            waits: set[asyncio.Future[Any]] = {done} if self._pending is None else {done, self._pending}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._pending is not None and self._pending.done():
                message, self._pending = self._pending.result(), None
                self._read.append(message)
                self.gone = message["type"] == "http.disconnect"

    async def _next(self) -> Message:
        return await self._source()

    def overhear(self, limits: Limits, count: Count | None, would: Callable[[str], None]) -> None:
        """Let the body pass as it is, and call ``would`` with each thing that would have been done to it."""
        source, heard, open_ = self._source, bytearray(), self._readable

        async def receive() -> Message:
            nonlocal open_
            message = await source()
            if open_ and message["type"] == "http.request":
                heard.extend(message.get("body", b""))
                open_ = len(heard) <= MOST_BODY and message.get("more_body", False)
                if len(heard) <= MOST_BODY and not open_:
                    with contextlib.suppress(Exception):  # it is only counted
                        changed = within(limits, bytes(heard), self.scope["path"], count)
                        for outcome in changed.outcomes if changed is not None else ():
                            would(outcome)
            return message

        self._source = receive

    # -- what the application is given -----------------------------------------------------------------

    @property
    def _readable(self) -> bool:
        headers = dict(self.scope["headers"])
        return b"json" in headers.get(b"content-type", b"") and b"content-encoding" not in headers

    def degrade(self, limits: Limits, count: Count | None) -> tuple[str, ...]:
        """Have the body keep to the limits; what was done, which is nothing where it need not be, or cannot be read."""
        if not self.complete or not self._readable:
            return ()
        bodies = [message for message in self._read if message["type"] == "http.request"]
        changed = within(limits, b"".join(message.get("body", b"") for message in bodies), self.scope["path"], count)
        if changed is None:
            return ()
        length = str(len(changed.body)).encode()
        headers = [(name, length if name == b"content-length" else value) for name, value in self.scope["headers"]]
        rest = [message for message in self._read if message["type"] != "http.request"]
        self.scope = {**self.scope, "headers": headers}
        self._read = [{"type": "http.request", "body": changed.body, "more_body": False}, *rest]
        self._marks = changed.headers
        return changed.outcomes

    def sending(self, send: Send) -> Send:
        """How the application's answer is sent: as it is, marked at its start if the request was changed."""
        if self.trial is not None:
            send = self.trial.sending(send)
        if not self._marks:
            return send

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._marks]}
            await send(message)

        return marked

    def within(self) -> AbstractContextManager[object]:
        """The session that the request names, for whatever runs inside."""
        if self.name is None:
            return contextlib.nullcontext()
        return sessions.session(self.name, priority=self.priority)

    def end(self) -> None:
        """Nothing is read any more."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None


# -- answers of the gate itself --------------------------------------------------------------------------


def refusal(why: str, retry_s: int) -> tuple[int, bytes, Sequence[Header]]:
    """503 in the shape of OpenAI's errors; ``why`` is a clause."""
    message = f"The server is degraded: {why}. Try again in {retry_s} s."
    body = msgspec.json.encode({"error": {"message": message, "type": "server_error", "param": None,
                                          "code": "overloaded"}})
    return 503, body, [(b"retry-after", str(retry_s).encode())]


NOT_READY: tuple[int, bytes, Sequence[Header]] = 503, b'{"ready":false,"reason":"degraded"}', ()


async def respond(send: Send, answer: tuple[int, bytes, Sequence[Header]]) -> None:
    """Send a whole answer."""
    status, body, headers = answer
    await send({"type": "http.response.start", "status": status, "headers": [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
