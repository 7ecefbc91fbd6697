"""Out of memory on a virtual GPU, as the middleware for errors tells it: by kvobs's own verdict, where there is one."""

from __future__ import annotations

import pytest

from tests.vgpu import needs_vgpu, on_vgpu

pytestmark = needs_vgpu()


def run(kind: str, observed: bool, hops: bool) -> dict[str, object]:
    """Fill a device of 200 MiB with blocks of 4, free some, and serve a request that asks for 32 MiB."""
    import asyncio
    from typing import Any

    import torch

    import kvobs
    from kvobs.asgi import ErrorMiddleware
    from kvobs.errors import tally

    if observed:
        kvobs.instrument(store=None, prometheus=None, otlp="off")

    def ask(size: int) -> torch.Tensor:
        return torch.empty(size << 20, dtype=torch.uint8, device="vgpu")

    blocks = {number: ask(4) for number in range(torch.vgpu.mem_get_info(0)[1] // (4 << 20))}
    # Of ten segments of five blocks each either all but one at the edge are freed, or five in all.
    for number in [n for n in blocks if n % 10 not in (4, 5)] if kind == "fragmented" else range(0, len(blocks), 10):
        del blocks[number]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await asyncio.to_thread(ask, 32) if hops else ask(32)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("The step failed.") from error

    async def send(message: Any) -> None:
        pass

    said = ""
    try:
        asyncio.run(ErrorMiddleware(app)({"type": "http"}, None, send))
    except RuntimeError as error:
        said = str(error)
    kvobs.uninstrument()
    return {"said": said, "failures": [[*key, count] for key, count in tally.failures().items()]}


@pytest.mark.parametrize(("kind", "observed", "hops", "expected"), [
    ("fragmented", True, False, "kv_fragmented"), ("fragmented", True, True, "kv_fragmented"),
    ("capacity", True, False, "kv_capacity"), ("fragmented", False, False, "out_of_memory")])
def test_the_class_is_the_truth(kind: str, observed: bool, hops: bool, expected: str) -> None:
    """Memory that is there in sum and memory that is not are two classes, also where the error comes from another
    thread and is wrapped; where kvobs does not observe the allocator, nobody judged.
    """
    found = on_vgpu(run, devices=("200MiB",), kind=kind, observed=observed, hops=hops)
    assert found == {"said": "The step failed.", "failures": [["asgi", expected, "stream", 1]]}
