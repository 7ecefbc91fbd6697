"""A batch of streamed chat completions, as a client with few threads of its own sees it: one event loop, plain sockets.

The client of the tests (OpenAI's library) takes as much of the processor as a small model; this one reads and times.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

CONCURRENCY = 8


class Answer(NamedTuple):
    """When the first and the last token of an answer came, in ns, and how many there were."""

    first_ns: int
    last_ns: int
    tokens: int


def batch(port: int, prompts: Sequence[str], tokens: int) -> dict[str, float]:
    """Wall nanoseconds per token of a batch, and their mean per token after a request's first.

    Raises:
        RuntimeError: an answer was refused or has not as many tokens as asked for.
        OSError: the server is gone.
    """
    began = time.perf_counter_ns()
    answers = asyncio.run(_all(port, prompts, tokens))
    wall = time.perf_counter_ns() - began
    later = [(answer.last_ns - answer.first_ns) / (answer.tokens - 1) for answer in answers]
    return {"wall": wall / sum(answer.tokens for answer in answers), "tpot": sum(later) / len(later)}


async def _all(port: int, prompts: Sequence[str], tokens: int) -> list[Answer]:
    room = asyncio.Semaphore(CONCURRENCY)

    async def one(prompt: str) -> Answer:
        async with room:
            return await asyncio.wait_for(_asked(port, prompt, tokens), timeout=300)

    return list(await asyncio.gather(*map(one, prompts)))


async def _asked(port: int, prompt: str, tokens: int) -> Answer:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
                       "temperature": 0, "ignore_eos": True, "stream": True,
                       "stream_options": {"include_usage": True}}).encode()
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n").encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"The server answered {status.decode(errors='replace').strip()!r}.")
        while await reader.readline() != b"\r\n":  # of what it says about the answer nothing is needed
            pass
        return await _read(reader, tokens)
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, tokens: int) -> Answer:
    """An answer's events: one with text for each token (or for some that came together), one with the usage."""
    first = last = 0
    usage: dict[str, Any] = {}
    while size := int(await reader.readline(), 16):
        events = await reader.readexactly(size + 2)
        now = time.perf_counter_ns()
        first = first or now
        if b'"choices":[]' in events:
            usage = next(found["usage"] for found in _events(events) if not found["choices"])
        elif not usage:
            last = now
    if usage.get("completion_tokens") != tokens:
        raise RuntimeError(f"{tokens} tokens were asked for, and the server's usage was {usage}.")
    return Answer(first, last, tokens)


def _events(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(b"data: ")) for line in text.splitlines() if line.startswith(b"data: {")]
