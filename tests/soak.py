"""A long run of many sessions on two virtual GPUs: nothing drifts, nothing leaks.

    python -m tests.soak --steps 10000

Every hundredth step the allocator's state is added up (rounding + gaps + requested = reserved, blocks fill their
segments without overlap), its statistics are compared with that state, kvobs's metrics with both, and the KV bytes that
kvobs tells with the tensors themselves. What kvobs itself holds is compared between a fifth of the run and its end.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.progress import Progress

import kvobs
import kvobs.virtual

EVERY = 100
LIVE = 8  # sessions at a time
MOST_TOKENS = 400  # of a session; then it ends
KEPT_BYTES = 256 * 1024  # by which what kvobs holds may differ: rings and series fill up
DEVICES = ("vgpu:0", "vgpu:1")


class Failed(Exception):
    """Something does not add up; one sentence."""


class Soak:
    """The sessions, and what is known of them."""

    def __init__(self, seed: int, observed: Any) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                             num_key_value_heads=2, vocab_size=256, max_position_embeddings=2 * MOST_TOKENS)
        made = LlamaForCausalLM(config).eval()
        self._models = {device: LlamaForCausalLM(config).eval().to(device) for device in DEVICES}
        for model in self._models.values():
            model.load_state_dict(made.state_dict())
        self._torch, self._draw, self._observed = torch, random.Random(seed), observed
        self._sessions: dict[str, tuple[Any, str]] = {}
        self._begun = 0
        self.moved = self.checks = 0

    def step(self) -> None:
        """One forward pass of one session; now and then one begins, ends, or moves to the other device."""
        draw = self._draw
        if not self._sessions or (len(self._sessions) < LIVE and draw.random() < 0.2):
            self._begin()
            return
        name = draw.choice(list(self._sessions))
        cache, device = self._sessions[name]
        length, chance = cache.get_seq_length(), draw.random()
        if length >= MOST_TOKENS or chance < 0.01:
            del self._sessions[name], cache
            gc.collect()
        elif chance < 0.015:
            self._move(name, cache, device)
        else:
            self._forward(name, cache, device, 1)

    def _begin(self) -> None:
        from transformers import DynamicCache

        self._begun += 1
        name, device = f"session {self._begun}", self._draw.choice(DEVICES)
        cache = DynamicCache()
        self._sessions[name] = cache, device
        self._forward(name, cache, device, self._draw.choice((3, 40, 200)))

    def _forward(self, name: str, cache: Any, device: str, tokens: int) -> None:
        ids = self._torch.full((1, tokens), 7, device=device)
        with kvobs.session(name), self._torch.inference_mode():
            self._models[device](input_ids=ids, cache=cache, use_cache=True)

    def _move(self, name: str, cache: Any, device: str) -> None:
        other = DEVICES[device == DEVICES[0]]
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.to(other), layer.values.to(other)
        self._sessions[name] = cache, other
        self.moved += 1
        self._forward(name, cache, other, 1)

    def check(self) -> None:
        """Add everything up.

        Raises:
            Failed: it does not.
        """
        self._observed.flush()
        points = {row.name: values for row, values in self._observed.runtime.metrics.collect()}
        usage, kv = points["kvobs.allocator.usage"], points.get("kvobs.kv.usage", {})
        for index, device in enumerate(DEVICES):
            segments = [segment for segment in self._torch.vgpu.memory_snapshot() if segment["device"] == index]
            found, stats = _sums(segments), self._torch.accelerator.memory_stats(index)
            for name, key in (("reserved", "reserved_bytes"), ("allocated", "allocated_bytes"),
                              ("active", "active_bytes"), ("requested", "requested_bytes"), ("segments", "segment"),
                              ("split", "inactive_split"), ("split_bytes", "inactive_split_bytes")):
                told = stats[f"{key}.all.current"]
                _equal(f"{key} of {device}", told, found[name])
                _equal(f"{key} of {device}, given less taken back",
                       stats[f"{key}.all.allocated"] - stats[f"{key}.all.freed"], told)
            _equal(f"the metric allocated of {device}", usage[device, "allocated"], found["allocated"])
            _equal(f"the metric unused of {device}", usage[device, "unused"], found["reserved"] - found["allocated"])
            held = sum(tensor.nbytes for cache, own in self._sessions.values() if own == device
                       for layer in cache.layers for tensor in (layer.keys, layer.values))
            told = sum(value for key, value in kv.items() if device in key and "held" in key)
            _equal(f"the metric KV bytes of {device}", told, held)
        self.checks += 1


def _equal(what: str, told: float, known: float) -> None:
    if told != known:
        raise Failed(f"{what} should be {known:,.0f} and is {told:,.0f}.")


def _sums(segments: list[dict[str, Any]]) -> dict[str, int]:
    found = dict.fromkeys(("reserved", "allocated", "active", "requested", "segments", "split", "split_bytes"), 0)
    for segment in segments:
        at, gaps, rounding, granted = segment["address"], 0, 0, 0
        for block in segment["blocks"]:
            _equal("the address of a block", block["address"], at)
            at += block["size"]
            free = block["state"] == "inactive"
            gaps += block["size"] if free else 0
            rounding += 0 if free else block["size"] - block["requested_size"]
            granted += 0 if free else block["requested_size"]
            if free and len(segment["blocks"]) > 1 and not segment["is_expandable"]:
                found["split"] += 1
                found["split_bytes"] += block["size"]
        _equal("rounding + gaps + requested of a segment", rounding + gaps + granted, segment["total_size"])
        for name, key in (("reserved", "total_size"), ("allocated", "allocated_size"), ("active", "active_size"),
                          ("requested", "requested_size")):
            found[name] += segment[key]
        found["segments"] += not segment["is_expandable"]
    return found


def _kept() -> int:
    """Bytes that lines of kvobs allocated and that are still held."""
    gc.collect()
    own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/kvobs/*")])
    return sum(statistic.size for statistic in own.statistics("filename"))


def run(steps: int, seed: int, store: str) -> Iterator[dict[str, Any]]:
    """One step after the other; what was found comes last."""
    kvobs.virtual.setup(["512MiB", "512MiB"])
    tracemalloc.start()
    with closing(_Observed(store)) as observed:
        soak, early, began = Soak(seed, observed.handle), 0, time.monotonic()
        for number in range(1, steps + 1):
            soak.step()
            if number % EVERY == 0 or number == steps:
                soak.check()
            if number == steps // 5:
                early = _kept()
            yield {}
        late = _kept()
        if late - early > KEPT_BYTES:
            raise Failed(f"kvobs held {early:,} bytes after {steps // 5:,} steps and {late:,} after {steps:,}.")
        yield {"steps": steps, "checks": soak.checks, "sessions": soak._begun, "moved": soak.moved,
               "kvobs_bytes_early": early, "kvobs_bytes_late": late, "seconds": round(time.monotonic() - began, 1)}


class _Observed:
    def __init__(self, store: str) -> None:
        self.handle = kvobs.instrument(store=store, prometheus="off", otlp="off", overhead_percent="100")

    def close(self) -> None:
        self.handle.uninstrument()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    told: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="kvobs-soak-") as store, \
                Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("steps", total=options.steps)
            for found in run(options.steps, options.seed, store):
                told = found
                progress.advance(task)
    except Failed as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
