"""The client's side of a real vLLM server: what OpenAI's own library saw of each request of a plan.

Runs in the Python that has vLLM (and so ``openai``). Arguments: the server's address and the plan as JSON, a list of
requests: ``number`` (which makes the trace), ``prompt``, ``max_tokens``, and where wanted ``n``, ``stream``, ``abort``
(hang up after so many chunks), ``chat``, ``stop`` and ``baggage``. It prints a list of what came back, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai


def headers(request: dict[str, Any]) -> dict[str, str]:
    number = request["number"]
    found = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
    return {**found, "baggage": request["baggage"]} if "baggage" in request else found


async def ask(client: Any, request: dict[str, Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {"number": request["number"], "chunks": 0, "broken": "", "completion": None, "prompt": None}
    content: dict[str, Any] = {"prompt": request["prompt"]}
    if request.get("chat"):
        content = {"messages": [{"role": "user", "content": request["prompt"]}]}
    words = {"model": "tiny", "max_tokens": request["max_tokens"], "n": request.get("n", 1), "seed": 1,
             "temperature": 1.0, "extra_headers": headers(request), "extra_body": {"ignore_eos": True}, **content}
    if "stop" in request:
        words["stop"] = request["stop"]
    make = client.chat.completions.create if request.get("chat") else client.completions.create
    try:
        if not request.get("stream"):
            answer = await make(**words)
            seen |= {"prompt": answer.usage.prompt_tokens, "completion": answer.usage.completion_tokens}
            return seen
        stream = await make(stream=True, stream_options={"include_usage": True}, **words)
        async for chunk in stream:
            if chunk.usage:
                seen |= {"prompt": chunk.usage.prompt_tokens, "completion": chunk.usage.completion_tokens}
            seen["chunks"] += bool(chunk.choices)
            if seen["chunks"] == request.get("abort"):
                await stream.close()
                break
    except (openai.OpenAIError, OSError) as error:
        seen["broken"] = type(error).__name__
    except Exception as error:  # httpx's, which the library lets through while it streams
        seen["broken"] = f"{type(error).__module__}.{type(error).__name__}"
    return seen


async def main(address: str, plan: list[dict[str, Any]]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=300) as client:
        print(json.dumps(await asyncio.gather(*(ask(client, request) for request in plan))))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
