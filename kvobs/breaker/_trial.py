"""Probes at a gate: requests that pass undegraded while level 3 is on probation, and how they ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvobs.breaker._gate import Probation
from kvobs.breaker._http import Message, Receive, Send

_MOST_PROCESSES = 64  # whose tickets are remembered


class Trial:
    """One request that is a probe."""

    def __init__(self, probation: Probation, ticket: int, clock: Callable[[], int]) -> None:
        self.process, self.ticket = probation.process, ticket
        self._first_byte_ns, self._clock, self._began_ns = probation.first_byte_ns, clock, clock()
        self._status: int | None = None
        self._streamed = self._begun = self._late = self._whole = self._left = False

    def receiving(self, receive: Receive) -> Receive:
        """Notice that the client leaves; everything is received as it is."""

        async def watched() -> Message:
            message = await receive()
            self._left = self._left or message.get("type") == "http.disconnect"
            return message

        return watched

    def sending(self, send: Send) -> Send:
        """Watch the answer on its way; it is sent as it is."""

        async def watched(message: Message) -> None:
            try:
                await send(message)
            except Exception:
                self._left = True
                raise
            with contextlib.suppress(Exception):  # what no server understands
                self._see(message)

        return watched

    def _see(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kind = dict(message.get("headers", ())).get(b"content-type", b"")
            self._streamed = kind.startswith(b"text/event-stream")
        elif message["type"] == "http.response.body":
            if not self._begun and message.get("body"):
                self._begun = True
                limit = self._first_byte_ns
                self._late = limit is not None and self._streamed and self._clock() - self._began_ns > limit
            self._whole = not self._left and not message.get("more_body", False)

    def good(self, *, raised: bool) -> bool | None:
        """How it ended: badly if the application raised or answered 5xx, or its first byte was late where it streams
        (of an answer in one piece that says nothing); well if the answer came whole. What its client cut off, or was
        its client's fault, says nothing.
        """
        failed = (raised and not self._left) or (self._status is not None and self._status >= 500)
        if failed or self._late:
            return False
        return True if self._whole and self._status is not None and self._status < 400 else None


class Trials:
    """The probes of one gate. One thread."""

    def __init__(self) -> None:
        self.in_flight: set[Trial] = set()
        self._newest: dict[str, int] = {}  # ticket that was used, of each breaker's process

    def begin(self, probation: Probation, clock: Callable[[], int]) -> Trial | None:
        """A probe, if one may go out; each ticket is used once, and older probes that have not ended count."""
        if len(self.in_flight) >= probation.at_most:
            return None
        used = self._newest.get(probation.process, 0)
        ticket = min((one for one in probation.tickets if one > used), default=None)
        if ticket is None:
            return None
        self._newest.pop(probation.process, None)
        self._newest[probation.process] = ticket
        if len(self._newest) > _MOST_PROCESSES:
            del self._newest[next(iter(self._newest))]
        trial = Trial(probation, ticket, clock)
        self.in_flight.add(trial)
        return trial

    def end(self, trial: Trial) -> None:
        """It ended."""
        self.in_flight.discard(trial)
