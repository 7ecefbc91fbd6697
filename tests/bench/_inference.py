"""What an inference server asks of an allocator: weights that stay, sessions whose caches grow by concatenation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from kvobs.allocator.program import ALLOC, FREE, Program
from kvobs.allocator.settings import MIB

LAYERS = 24
ROW = 2048  # bytes of one token in the K (or V) of one layer
HIDDEN = 8192  # bytes of one token between layers
LOGITS = 304 * 1024  # bytes of one token's logits
WEIGHTS = (32 * MIB, 8 * MIB, 8 * MIB, 32 * MIB, 44 * MIB, 44 * MIB, 44 * MIB, 8192, 8192)
SESSIONS = 12
Alloc = Callable[[int, int, int], int | None]  # size, layer, place in the code: a handle, or None (out of memory)
Free = Callable[[int], None]


class Failed(Exception):
    """A request was out of memory."""


@dataclass(slots=True)
class _Session:
    tokens: int
    left: int
    caches: list[int] = field(default_factory=list)  # handles: K and V of each layer


class Server:
    """Runs on any allocator. ``tick`` does one prefill or decode step; an out-of-memory error ends the session."""

    def __init__(self, alloc: Alloc, free: Free, seed: int = 1) -> None:
        self._alloc, self._free, self._chance = alloc, free, random.Random(seed)
        self._sessions: list[_Session] = []

    def load(self) -> None:
        """The weights."""
        for layer in range(LAYERS):
            for place, size in enumerate(WEIGHTS):
                self._take(size, layer, place)

    def tick(self) -> None:
        """One step of one session, or a new one."""
        if not self._sessions or (len(self._sessions) < SESSIONS and self._chance.random() < 0.02):
            session = _Session(self._chance.randrange(16, 2048), self._chance.randrange(20, 400))
            self._sessions.append(session)
        else:
            session = self._chance.choice(self._sessions)
        try:
            self._step(session)
        except Failed:
            session.left = 0
        if session.left <= 0:
            self._end(session)

    def _step(self, session: _Session) -> None:
        width = 1 if session.caches else session.tokens
        session.tokens += 1 if session.caches else 0
        session.left -= 1
        held: list[int] = []
        try:
            held.append(self._take(width * HIDDEN, 0, 10))
            for layer in range(LAYERS):
                self._layer(session, layer, width)
            held.append(self._take(width * LOGITS, 0, 11))
        finally:
            for handle in reversed(held):
                self._free(handle)

    def _layer(self, session: _Session, layer: int, width: int) -> None:
        """Activations live as long as the layer; K and V are copied to where one token more has room."""
        held: list[int] = []
        try:
            held.append(self._take(width * HIDDEN, layer, 20))
            for part in (0, 1):
                held.append(self._take(width * ROW, layer, 21 + part))
                self._grow(session, 2 * layer + part, self._take(session.tokens * ROW, layer, 23 + part))
                self._free(held.pop())
            for place, size in ((25, HIDDEN), (26, HIDDEN * 7 // 2), (27, HIDDEN)):
                held.append(self._take(width * size, layer, place))
        finally:
            for handle in reversed(held):
                self._free(handle)

    def _grow(self, session: _Session, place: int, whole: int) -> None:
        if place < len(session.caches):
            self._free(session.caches[place])
            session.caches[place] = whole
        else:
            session.caches.append(whole)

    def _take(self, size: int, layer: int, place: int) -> int:
        handle = self._alloc(size, layer, place)
        if handle is None:
            raise Failed
        return handle

    def _end(self, session: _Session) -> None:
        self._sessions.remove(session)
        for handle in session.caches:
            self._free(handle)


def program(operations: int) -> Program:
    """At least so many operations of a server with memory enough; beyond a million they repeat, from empty to empty."""
    part = _part(min(operations, 1_000_000))
    made = Program()
    rounds, handles = -(-operations // len(part)), max(part.handle) + 1
    for number in range(rounds):
        first = number * handles
        made.op += part.op
        made.handle.extend([handle + first for handle in part.handle] if first else part.handle)
        made.size += part.size
        made.stream += part.stream
        made.pool += part.pool
    return made


def _part(operations: int) -> Program:
    made, live = Program(), dict[int, None]()

    def alloc(size: int, layer: int, place: int) -> int:
        handle = next(numbers)
        made.add(ALLOC, handle, size)
        live[handle] = None
        return handle

    def free(handle: int) -> None:
        made.add(FREE, handle)
        del live[handle]

    numbers = itertools.count()
    server = Server(alloc, free)
    server.load()
    while len(made) < operations:
        server.tick()
    for handle in list(live):
        free(handle)
    return made
