"""Private pools: a decode step over a static cache as a CUDA graph, of the model and of a few plain operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tests.gpu._checks import check
from tests.gpu._model import Served

LENGTH, REPLAYS, WARM = 128, 4, 3
MIB = 1 << 20


class NoGraphs(Exception):
    """This kind of device captures nothing; one sentence."""


def refuse_without_graphs(device: Any) -> None:
    """Only CUDA has graphs.

    Raises:
        NoGraphs: this device is another.
    """
    if not hasattr(device.module, "CUDAGraph"):
        raise NoGraphs(f"Devices of kind {device.kind} capture no graphs.")


def capture(device: Any, step: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """Run a step a few times on a side stream, as a capture needs it, and then capture it."""
    cuda = device.module
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(WARM):
            step()
    cuda.current_stream().wait_stream(side)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph, pool=pool):
        result = step()
    return graph, result


def model_step(device: Any, served: Served) -> dict[str, Any]:
    """The model's own decode step over its StaticCache; masks and positions are given, so that nothing must wait."""
    refuse_without_graphs(device)
    torch = device.torch
    from transformers import StaticCache

    model = served.model
    accepted = inspect.signature(type(model).forward).parameters
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    prompt = torch.arange(3, 3 + 32, device=device.device)[None]
    more = {served.cache_argument: cache, "use_cache": True}
    with torch.no_grad():
        model(prompt, **more, **_positions(torch, accepted, torch.arange(32, device=device.device)))
        token = torch.full((1, 1), 5, device=device.device)
        at = torch.tensor([32], device=device.device)
        seen = torch.arange(LENGTH, device=device.device)

        def step() -> Any:
            mask = (seen <= at)[None, None, None]
            logits = model(token, attention_mask=mask, **more, **_positions(torch, accepted, at)).logits
            at.add_(1)
            return logits

        graph, logits = capture(device, step)
        for _ in range(REPLAYS):
            graph.replay()
        device.settle()
    passed = int(at.item()) - 32  # warm-ups and replays; a capture itself runs nothing
    return {"replays": REPLAYS, "keep": [graph, logits, cache],
            "checks": [check("every replayed step advanced the position", WARM + REPLAYS, passed),
                       check("logits are finite", True, bool(torch.isfinite(logits).all().item()))]}


def _positions(torch: Any, accepted: Any, at: Any) -> dict[str, Any]:
    return {"position_ids": at[None]} | ({"cache_position": at} if "cache_position" in accepted else {})


def plain_step(device: Any) -> dict[str, Any]:
    """Attention of one query over static K and V, captured twice in pools of their own, once more in a shared one."""
    refuse_without_graphs(device)
    torch = device.torch
    shape, options = (1, 8, LENGTH, 64), {"dtype": torch.bfloat16, "device": device.device}
    keys, values = torch.zeros(shape, **options), torch.zeros(shape, **options)
    query, at = torch.ones((1, 8, 1, 64), **options), torch.tensor([0], device=device.device)

    def step() -> Any:
        keys.index_copy_(2, at, query)
        values.index_copy_(2, at, query)
        weights = torch.softmax(query @ keys.transpose(2, 3), dim=-1)
        scratch = torch.empty(3 * MIB, dtype=torch.uint8, device=device.device).fill_(1)  # a large block as well
        at.add_(1)
        return weights @ values + scratch[0]

    first, out = capture(device, step)
    shared, more = capture(device, step, pool=first.pool())
    second, gone = capture(device, step)
    for graph in (first, shared, second):
        graph.replay()
    device.settle()
    passed = int(at.item())
    del second, gone, graph  # its pool may now be returned to the device
    device.settle()
    device.module.empty_cache()
    return {"captures": 3, "keep": [first, out, shared, more, keys, values],
            "checks": [check("every warm-up and replay advanced the position", 3 * WARM + 3, passed)]}
