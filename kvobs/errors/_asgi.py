"""Middleware for any ASGI server that counts how requests end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from opentelemetry import trace

from kvobs.errors._end import ended
from kvobs.errors._tally import tally

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
SERVER = "asgi"


class ErrorMiddleware:
    """Counts the HTTP requests of an application and tells its failures apart; exceptions pass it unchanged.

    vLLM takes it as ``--middleware kvobs.asgi.ErrorMiddleware``. Of bodies it sees the ends only. A request whose
    client left before the answer's end is ``cancelled``, whatever the application made of that; it is known where
    the application reads ``http.disconnect``, where the server raises ``OSError`` on sending, or where the request is
    cancelled. WebSockets and the lifespan pass by.

    Args:
        app: the application.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        tally.begin(SERVER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or whatever else the server has to say to the application."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        watched = _Watched(receive, send)
        error: BaseException | None = None
        try:
            return await self.app(scope, watched.receive, watched.send)
        except BaseException as raised:
            error = raised
            raise
        finally:
            ended(SERVER, trace.get_current_span(), error, watched.status, gone=watched.gone, whole=watched.whole,
                  began=watched.began)
            del error  # its traceback holds this frame


class _Watched:
    """The two callables that the application is given, and what went through them."""

    __slots__ = ("_receive", "_send", "_trailers", "began", "gone", "status", "whole")

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.status: int | None = None
        self.began = self.whole = self.gone = self._trailers = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.whole:
            self.gone = True
        return message

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.body" or kind == "http.response.zerocopysend":
            # Before it is sent: once it is, the server says http.disconnect to whoever waits for that.
            self.whole = not message.get("more_body", False) and not self._trailers
        elif kind == "http.response.start":
            status, self._trailers = message["status"], message.get("trailers", False)
        elif kind == "http.response.pathsend":
            self.whole = not self._trailers
        elif kind == "http.response.trailers":
            self.whole = not message.get("more_trailers", False)
        try:
            await self._send(message)
        except OSError:
            self.gone = True
            raise
        if kind == "http.response.start":
            self.status, self.began = status, True
