"""Facts to events, as kubectl users expect: one event per reason and subject with a count, and no flood.

Pure: time comes in, the API is a Protocol.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from kvobs.cli._output import plain
from kvobs.cli.k8s._facts import Fact

SECOND_NS = 1_000_000_000
QUIET_NS = 600 * SECOND_NS  # after which the same is a new event
SPACING_NS, MOST_SPACING_NS = 10 * SECOND_NS, 300 * SECOND_NS  # between two writes of one event
RETRY_NS, MOST_RETRY_NS = SECOND_NS, 60 * SECOND_NS  # after the API failed
MOST_EVENTS = 64  # at a time
MESSAGE_LIMIT = 1024  # the API's bound on a message, in bytes
TRACE = "kvobs/trace-id"  # the annotation


class ApiError(Exception):
    """The API refused or cannot be reached. ``status`` is that of HTTP; None without an answer."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class Api(Protocol):
    """The few calls that are needed."""

    def create(self, body: dict[str, Any]) -> None:
        """Create an event; ApiError 409 where its name is taken."""
        ...

    def patch(self, name: str, change: dict[str, Any]) -> None:
        """Change an event; ApiError 404 where it expired."""
        ...


class Pod(msgspec.Struct, frozen=True):
    """Whom the events are about. Without its ``uid`` kubectl describe does not show them."""

    namespace: str
    name: str
    uid: str = ""


class _Event(msgspec.Struct):
    fact: Fact
    first_ns: int
    count: int = 0
    written: int = 0  # the count that the API knows
    next_ns: int = 0
    spacing_ns: int = SPACING_NS


class Recorder:
    """Merges facts and writes what is due; what cannot be written now stays merged and is tried again."""

    def __init__(self, api: Api, pod: Pod, jaeger: str = "") -> None:
        self._api, self._pod, self._jaeger = api, pod, jaeger
        self._events: dict[tuple[str, str], _Event] = {}
        self._retry_ns, self._again_ns = RETRY_NS, 0
        self.dropped = 0
        self.problem = ""  # why the last write failed

    @property
    def pending(self) -> int:
        """Events whose latest state the API does not know yet."""
        return sum(event.written != event.count for event in list(self._events.values()))

    def add(self, facts: Iterable[Fact]) -> None:
        """Take facts in; what would be more than 64 events at a time is dropped and counted."""
        for fact in facts:
            key = (fact.reason, fact.subject)
            event = self._events.get(key)
            if event is not None and event.written == event.count and fact.wall_ns - event.fact.wall_ns > QUIET_NS:
                event = None
            if event is None:
                if key not in self._events and len(self._events) >= MOST_EVENTS and not self._forget(fact.wall_ns):
                    self.dropped += 1
                    continue
                event = self._events[key] = _Event(fact, fact.wall_ns)
            event.fact, event.count = fact, event.count + 1

    def write(self, now_ns: int) -> int:
        """Write what is due at ``now_ns`` (by any clock that is not set); returns how many events were written."""
        return self._write(now_ns, lambda event: max(event.next_ns, self._again_ns) <= now_ns)

    def flush(self, now_ns: int) -> int:
        """As ``write``, for the end: also what waits for its time. The API's first failure ends it."""
        return self._write(now_ns, lambda event: True)

    def _write(self, now_ns: int, due: Callable[[_Event], bool]) -> int:
        done = 0
        for event in list(self._events.values()):
            if event.count == event.written or not due(event):
                continue
            try:
                self._put(event)
            except ApiError as error:
                self.problem = str(error)
                self._again_ns = now_ns + self._retry_ns
                self._retry_ns = min(self._retry_ns * 2, MOST_RETRY_NS)
                break
            done += 1
            self.problem, self._retry_ns, self._again_ns = "", RETRY_NS, 0
            event.written, event.next_ns = event.count, now_ns + event.spacing_ns
            event.spacing_ns = min(event.spacing_ns * 2, MOST_SPACING_NS)
        return done

    def _put(self, event: _Event) -> None:
        body = self.body(event.fact, event.first_ns, event.count)
        change = {key: body[key] for key in ("count", "lastTimestamp", "message")}
        change["metadata"] = {"annotations": {TRACE: event.fact.trace_id or None}}  # null takes an older one away
        try:
            if event.written:
                self._api.patch(body["metadata"]["name"], change)
            else:
                self._api.create(body)
        except ApiError as error:
            if event.written and error.status == 404:
                self._api.create(body)
            elif not event.written and error.status == 409:  # an answer of ours was lost
                self._api.patch(body["metadata"]["name"], change)
            else:
                raise

    def body(self, fact: Fact, first_ns: int, count: int) -> dict[str, Any]:
        """The event as the API's ``v1`` has it."""
        pod = self._pod
        digest = hashlib.sha256(f"{fact.reason}\0{fact.subject}\0{first_ns}".encode(errors="replace")).hexdigest()[:16]
        annotations = {TRACE: fact.trace_id} if fact.trace_id else {}
        traced = self._traced(fact.trace_id)
        message = _cut(plain(fact.message), MESSAGE_LIMIT - len(traced.encode()))
        return {
            "apiVersion": "v1", "kind": "Event",
            "metadata": {"name": f"{pod.name[:200]}.{digest}", "namespace": pod.namespace,
                         **({"annotations": annotations} if annotations else {})},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name,
                               **({"uid": pod.uid} if pod.uid else {})},
            "reason": fact.reason, "message": message + traced, "type": "Warning" if fact.warning else "Normal",
            "source": {"component": "kvobs"}, "count": count,
            "firstTimestamp": _time(first_ns), "lastTimestamp": _time(fact.wall_ns)}

    def _traced(self, trace_id: str) -> str:
        """At most half a message: a link that is longer is left out."""
        link = f" Trace {trace_id} ({self._jaeger}/trace/{trace_id})."
        if trace_id and self._jaeger and len(link.encode()) <= MESSAGE_LIMIT // 2:
            return link
        return _cut(f" Trace {trace_id}.", MESSAGE_LIMIT // 2) if trace_id else ""

    def _forget(self, now_ns: int) -> bool:
        """Make room: leave out the event that was quiet the longest, if it is written and quiet long enough."""
        quiet = [(event.fact.wall_ns, key) for key, event in self._events.items()
                 if event.written == event.count and now_ns - event.fact.wall_ns > QUIET_NS]
        if quiet:
            del self._events[min(quiet)[1]]
        return bool(quiet)


def _time(wall_ns: int) -> str:
    return datetime.datetime.fromtimestamp(wall_ns // SECOND_NS, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cut(text: str, most: int) -> str:
    """At most so many bytes of it, whole characters."""
    return text.encode(errors="replace")[:most].decode(errors="ignore")
