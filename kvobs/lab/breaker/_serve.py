"""One run: a server of chat sessions, step by step, and everything that became of its requests.

A step is a second of the modelled clock: whoever comes asks the gate, whoever is active makes one pass, and kvobs looks
and decides. A session keeps its cache while its user thinks. A request that runs out of memory fails and, as with one
that is refused, its session ends.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvobs.breaker import Limits
from kvobs.breaker._admission import Ticket
from kvobs.lab.breaker._engine import STEP, VOCABULARY, cache, follow
from kvobs.lab.breaker._front import Front, active, waiting
from kvobs.lab.breaker._load import Session
from kvobs.lab.breaker._outcome import Outcome
from kvobs.sessions import session as named

LONGEST = 600  # steps after which nobody is waited for


def answers(digests: Mapping[str, str]) -> str:
    """One digest of the digests of all turns, in whatever order they ended."""
    return hashlib.blake2b(json.dumps(sorted(digests.items())).encode(), digest_size=8).hexdigest()


class _Chat:
    """A session that is there: its cache, the turn it is at, and its request."""

    def __init__(self, told: Session, model: Any) -> None:
        self.told, self.cache, self.turn = told, cache(model), 0
        self.at = told.arrival_s
        self.ticket: Ticket | None = None
        self.limits: Limits | None = None
        self.pending: list[int] = []
        self.left = self.made = 0
        self.digest = hashlib.blake2b(digest_size=8)


class Server:
    """Serves sessions. ``second`` is called at the end of each step: the clock goes on and kvobs decides."""

    def __init__(self, model: Any, front: Front, second: Callable[[], None]) -> None:
        self._model, self._front, self._second = model, front, second
        self._resting: list[_Chat] = []
        self._waiting: list[_Chat] = []
        self._active: list[_Chat] = []
        self._digests: dict[str, str] = {}
        self.outcome = Outcome()

    def serve(self, sessions: Iterable[Session]) -> Outcome:
        """All sessions from their first to their last turn."""
        coming = deque(sessions)
        for step in range(LONGEST):
            while coming and coming[0].arrival_s <= step:
                self._resting.append(_Chat(coming.popleft(), self._model))
            self._ask(step)
            self._settle()
            for chat in list(self._active):
                self._pass(chat, step)
            self._second()
            if not (coming or self._resting or self._waiting or self._active):
                break
        self.outcome.steps = step + 1
        self.outcome.unfinished = len(self._active)
        self.outcome.answers = answers(self._digests)
        return self.outcome

    # -- coming ----------------------------------------------------------------------------------------

    def _ask(self, step: int) -> None:
        for chat in [one for one in self._resting if one.at <= step]:
            self._resting.remove(chat)
            self.outcome.asked += 1
            chat.ticket, chat.limits = self._front.ask(chat.told.name, chat.told.priority)
            if chat.ticket is not None and active(chat.ticket):
                self._begin(chat)
            elif chat.ticket is not None and waiting(chat.ticket):
                self._waiting.append(chat)
            else:
                self._refused(chat)

    def _settle(self) -> None:
        self._front.settle()
        for chat in list(self._waiting):
            assert chat.ticket is not None
            if not waiting(chat.ticket):
                self._waiting.remove(chat)
                chat.limits = self._front.limits(chat.told.priority)
                (self._begin if active(chat.ticket) else self._refused)(chat)

    def _begin(self, chat: _Chat) -> None:
        turn = chat.told.turns[chat.turn]
        most = chat.limits.max_new_tokens if chat.limits is not None else None
        chat.left = turn.answer if most is None else min(turn.answer, most)
        chat.made = 0
        self.outcome.admitted += 1
        self.outcome.cut += turn.answer - chat.left
        chat.pending += [(7 * index + chat.turn) % VOCABULARY for index in range(turn.prompt)]
        self._active.append(chat)

    def _refused(self, chat: _Chat) -> None:
        self.outcome.shed += 1
        self.outcome.turns_lost += len(chat.told.turns) - chat.turn - 1

    # -- working ---------------------------------------------------------------------------------------

    def _pass(self, chat: _Chat, step: int) -> None:
        import torch

        try:
            with named(chat.told.name):
                fresh = follow(self._model, chat.pending, chat.cache)
        except torch.OutOfMemoryError:
            self.outcome.errors += 1
            self.outcome.turns_lost += len(chat.told.turns) - chat.turn - 1
            self._leave(chat)
            return
        taken = fresh[:min(STEP, chat.left)]
        chat.digest.update(repr(taken).encode())
        chat.pending, chat.left, chat.made = taken, chat.left - len(taken), chat.made + len(taken)
        if not chat.left:
            self.outcome.finished += 1
            self.outcome.tokens += chat.made
            self._digests[f"{chat.told.name}.{chat.turn}"] = chat.digest.hexdigest()
            self._leave(chat)
            chat.at = step + chat.told.turns[chat.turn].think_s
            chat.turn += 1
            if chat.turn < len(chat.told.turns):
                self._resting.append(chat)

    def _leave(self, chat: _Chat) -> None:
        self._active.remove(chat)
        assert chat.ticket is not None
        self._front.leave(chat.ticket)
