"""The users, as one event loop with plain sockets: they stream answers, time them, and come back when refused.

Nothing of kvobs is in what is measured here. A turn's time to its first token begins when it is first sent: whoever is
refused and comes back after ``Retry-After`` has waited meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from kvobs.lab.breaker_vllm._plan import Session, Turn

MODEL = "model"
ATTEMPTS = 8  # after so many refusals a user goes away
PATIENCE_S = 300


class Told(msgspec.Struct, frozen=True):
    """What became of a turn: seconds until the first token (None: there was none) and the last, and tokens.

    ``gaps_s`` is the longest pause between two pieces of the answer, ``wanted`` the tokens that were asked for.
    """

    session: str
    priority: str
    first_s: float | None
    last_s: float
    longest_gap_s: float
    tokens: int
    wanted: int
    refusals: int


class Refused(Exception):
    """The server said 503; ``after_s`` is when to come back."""

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        self.after_s = after_s


def talk(port: int, users: Sequence[Session]) -> tuple[list[Told], float]:
    """Have all sessions; what became of each turn, and the seconds that everything took.

    Raises:
        RuntimeError: the server answered what it should not.
        OSError: the server is gone.
    """
    began = time.perf_counter()
    told = asyncio.run(_all(port, users))
    return told, time.perf_counter() - began


async def _all(port: int, users: Sequence[Session]) -> list[Told]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_session(port, user)) for user in users]
    return [told for task in tasks for told in task.result()]


async def _session(port: int, user: Session) -> list[Told]:
    """One user's turns; one who was sent away for good says nothing more."""
    await asyncio.sleep(user.begin_s)
    said: list[dict[str, str]] = []
    found: list[Told] = []
    for turn in user.turns:
        await asyncio.sleep(turn.think_s)
        said.append({"role": "user", "content": turn.line})
        told, text = await _turn(port, user, turn, said)
        found.append(told)
        if told.first_s is None:
            break
        said.append({"role": "assistant", "content": text})
    return found


async def _turn(port: int, user: Session, turn: Turn, said: list[dict[str, str]]) -> tuple[Told, str]:
    began, refusals = time.perf_counter(), 0
    while refusals < ATTEMPTS:
        try:
            times, tokens, text = await asyncio.wait_for(_asked(port, user, turn.answer, said), PATIENCE_S)
        except Refused as refused:
            refusals += 1
            await asyncio.sleep(refused.after_s)
            continue
        gap = max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)
        return Told(user.name, user.priority, times[0] - began, times[-1] - began, gap, tokens, turn.answer,
                    refusals), text
    return Told(user.name, user.priority, None, time.perf_counter() - began, 0.0, 0, turn.answer, refusals), ""


async def _asked(port: int, user: Session, tokens: int, said: list[dict[str, str]]
                 ) -> tuple[list[float], int, str]:
    body = json.dumps({"model": MODEL, "messages": said, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                       "repetition_penalty": 1.1, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"kvobs-session: {user.name}\r\nkvobs-priority: {user.priority}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n").encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + body)
        status = (await reader.readline()).decode("latin-1").strip()
        headers: dict[str, str] = {}
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        if " 503 " in status:
            raise Refused(float(headers.get("retry-after", "1")))
        if " 200 " not in status:
            raise RuntimeError(f"The server answered {status!r}: {(await reader.read(500)).decode(errors='replace')}")
        return await _read(reader)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader) -> tuple[list[float], int, str]:
    """When pieces of the answer came, its tokens by the server's usage, and its text."""
    times: list[float] = []
    tokens, text = 0, ""
    while size := int(await reader.readline(), 16):
        piece = await reader.readexactly(size + 2)
        now = time.perf_counter()
        for event in _events(piece):
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                delta = choice["delta"].get("content") or ""
                text += delta
                if delta or choice.get("finish_reason"):
                    times.append(now)
    if not times:
        raise RuntimeError("The server ended an answer without a token.")
    return times, tokens, text


def _events(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(b"data: ")) for line in text.splitlines() if line.startswith(b"data: {")]
