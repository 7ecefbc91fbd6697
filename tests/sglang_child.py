"""Programs on SGLang's real classes, run in a process of their own; what they saw goes out as one line of JSON."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from tests.sglang_wheel import VARIABLE, importable


def main() -> None:
    """Run every program."""
    importable(Path(os.environ[VARIABLE]))
    from sglang.srt.managers import schedule_policy  # noqa: F401  (so that every hook finds its place)

    from tests.sglang_world import standing_in

    scheduler = standing_in()
    answer: dict[str, Any] = {"programs": []}
    for tree in ("radix", "unified"):
        for page in (1, 4, 16):
            answer["programs"] += [random_program(scheduler, tree, page, seed) for seed in range(4)]
        answer[f"retract {tree}"] = retraction(scheduler, tree)
        answer[f"leak {tree}"] = leak(scheduler, tree)
        answer[f"ages {tree}"] = ages(scheduler, tree)
    answer["sliding"] = [sliding_program(scheduler, seed, asks=True) for seed in range(3)]
    answer["unasked"] = [sliding_program(scheduler, seed, asks=False) for seed in range(3)]
    answer["registry"] = registry()
    print(json.dumps(answer))


class Seen:
    """A source alone; every iteration is read, as if each took longer than a tenth of a second."""

    def __init__(self) -> None:
        from kvobs.bus import Bus
        from kvobs.config import Config
        from kvobs.sources import Wiring
        from kvobs.sources.sglang import SglangSource, _hooks

        _hooks.READ_NS = 0
        self.bus = Bus(1_000_000)
        self.source = SglangSource(Wiring(Config(), self.bus, lambda: None))  # type: ignore[arg-type,return-value]
        self.source.install(self.bus.publish)
        self.events: list[Any] = []

    def all(self, kind: str) -> list[Any]:
        """Events of a kind so far."""
        self.events += self.bus.drain()
        return [event for event in self.events if type(event).__name__ == kind]

    def last(self) -> dict[str, Any]:
        """The latest word on the pool, as one table."""
        blocks, work = self.all("Blocks")[-1], self.all("PoolWork")[-1]
        return {name: getattr(event, name) for event in (work, blocks) for name in event.__struct_fields__
                if name not in ("t_ns", "origin", "cache_id")}

    def facts(self) -> dict[str, list[Any]]:
        """Availability by subject."""
        return {fact.subject: [fact.available, fact.reason] for fact in self.source.availability()}

    def close(self) -> list[str]:
        """Uninstall; the hooks that failed."""
        self.source.uninstall()
        return [f"{event.hook}: {event.error}" for event in self.all("HookFailed")]


def random_program(scheduler: type, tree: str, page: int, seed: int) -> dict[str, Any]:
    """Requests that share prefixes come, grow, publish and leave in a pool that is too small for them."""
    from tests.sglang_world import World

    draw, seen, steps = random.Random(f"{tree} {page} {seed}"), Seen(), []
    world = World(scheduler, tree, page)
    world.step()
    refused = evicted = 0
    for turn in range(60):
        before = world.census()
        cached = before["cached"] + before["locked"]
        name, does = "", draw.choice(("admit", "admit", "decode", "decode", "checkpoint", "finish"))
        if does == "admit" or not world.live:
            family = draw.randrange(3)
            length = draw.randint(2, max(3, world.size // 3))
            same = draw.randrange(length)
            tokens = [family * 10_000 + at if at < same else 100_000 + turn * 1_000 + at for at in range(length)]
            refused += not world.admit(f"r{turn}", tokens)
        else:
            name = draw.choice(sorted(world.live))
            if does == "decode":
                for _ in range(draw.randint(1, 2 * page)):
                    if not world.decode(name):
                        refused += 1
                        break
            elif does == "checkpoint":
                world.checkpoint(name)
            else:
                world.finish(name)
        world.step()
        after = world.census()
        if does in ("admit", "decode") or not name:
            evicted += cached - after["cached"] - after["locked"]
        steps.append({"census": after, "told": seen.last(), "live": len(world.live), "refused": refused,
                      "evicted": evicted, "allocated": world.allocated,
                      "tail": sum(-req.kv.kv_allocated_len % page for req in world.live.values()) if page > 1 else 0})
    blocks = seen.all("Blocks")[-1]
    facts = seen.facts()
    return {"tree": tree, "page": page, "seed": seed, "steps": steps, "facts": facts, "cache": blocks.origin.cache,
            "pages": world.size // page, "told_evicted": sum(sum(one.ages) for one in seen.all("Evictions")),
            "failed": seen.close()}


def sliding_program(scheduler: type, seed: int, *, asks: bool) -> dict[str, Any]:
    """A model whose layers slide but for some: two pools, of which the sliding one is the smaller.

    ``asks``: before a token is decoded the allocator is asked whether it fits, as SGLang's scheduler does.
    """
    from tests.sglang_world import World

    draw, seen, steps = random.Random(f"sliding {seed}"), Seen(), []
    world = World(scheduler, "sliding", 4, pages=32)
    world.step()
    pools = {event.cache_id: event.origin.cache.split("/")[1] for event in seen.all("Blocks")}
    refused = 0
    for turn in range(60):
        does = draw.choice(("admit", "admit", "decode", "decode", "checkpoint", "finish"))
        if does == "admit" or not world.live:
            length, family = draw.randint(2, 30), draw.randrange(2)
            refused += not world.admit(f"r{turn}", [family * 10_000 + at if at < length // 2 else 1_000 * turn + at
                                                    for at in range(length)])
        else:
            name = draw.choice(sorted(world.live))
            if does == "decode":
                for _ in range(draw.randint(1, 12)):
                    if asks and not world.fits():
                        break
                    if not world.decode(name):
                        refused += 1
                        break
            else:
                getattr(world, does)(name)
        world.step()
        latest = {pools[event.cache_id]: event for event in seen.all("Blocks")}
        works = {pools[event.cache_id]: event for event in seen.all("PoolWork")}
        steps.append({
            "census": {"full": world.census(), "swa": world.census(sliding=True)}, "refused": refused,
            "told": {name: [one.used, one.cached, one.free] for name, one in latest.items()},
            "unexplained": [one.unexplained for one in works.values()],
            "failures": sum(one.failures for one in latest.values()),
            "bytes": {name: one.block_bytes for name, one in latest.items()}})
    return {"steps": steps, "facts": seen.facts(), "failed": seen.close()}


def retraction(scheduler: type, tree: str) -> dict[str, Any]:
    """Three requests decode until the next step does not fit; SGLang retracts."""
    from tests.sglang_world import World

    seen, world = Seen(), World(scheduler, tree, 4, pages=12)
    world.step()
    for name, length in (("short", 7), ("long", 15), ("middle", 11)):
        assert world.admit(name, [1_000 * length + at for at in range(length)])
    lengths: dict[str, int] = {}
    gone: tuple[list[str], list[str]] = ([], [])
    while not gone[0]:
        gone = world.retract()
        if gone[0]:
            break
        lengths = {}
        for name in list(world.live):
            world.decode(name)
            lengths[name] = world.live[name].kv.kv_committed_len
    world.step()
    return {"gone": gone, "lengths": lengths, "told": seen.last(), "census": world.census(), "preemptions": [
        {"request": one.request, "cause": one.cause, "lost": one.tokens_lost, "blocks": one.blocks,
         "holders": one.holders} for one in seen.all("Preemption")], "failed": seen.close()}


def leak(scheduler: type, tree: str) -> dict[str, Any]:
    """Pages vanish while a request runs, come back, and vanish again with nobody there."""
    from tests.sglang_world import World

    seen, world = Seen(), World(scheduler, tree, 4)
    assert world.admit("one", list(range(10)))
    world.step()
    found = {"sound": [seen.last(), seen.facts()]}
    taken = world.allocator.alloc(3 * 4)
    world.step()
    found["once"] = [seen.last(), seen.facts()]
    world.step()
    found["twice"] = [seen.last(), seen.facts()]
    world.allocator.free(taken)
    world.step()
    found["mended"] = [seen.last(), seen.facts()]
    world.finish("one")
    world.allocator.alloc(2 * 4)
    world.step()
    found["idle"] = [seen.last(), seen.facts()]
    return found | {"failed": seen.close()}


def ages(scheduler: type, tree: str) -> dict[str, Any]:
    """A prefix is kept, waits, and is evicted: the clocks are the test's own."""
    import time

    from tests.sglang_world import World

    seen, world = Seen(), World(scheduler, tree, 4, pages=12)
    world.step()
    assert world.admit("old", list(range(20)))
    world.finish("old")
    began = time.monotonic_ns()
    while time.monotonic_ns() - began < 60_000_000:
        world.tree.evictable_size()
    assert world.admit("new", list(range(1_000, 1_040)))
    world.step()
    ended = time.monotonic_ns()
    told = [[sum(one.ages), one.ages_sum_ns, one.idles_sum_ns] for one in seen.all("Evictions")]
    return {"told": told, "at_least": 60_000_000, "at_most": ended - began, "evictions": seen.last()["evictions"],
            "failed": seen.close()}


def registry() -> dict[str, Any]:
    """As SGLang's plugin: hooks are in the registry, each place is wrapped once, and is put back by identity."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvobs.sources.sglang import _hooking

    places = [(TokenToKVPoolAllocator, "alloc"), (RadixCache, "evict"), (RadixCache, "reset")]

    def depths() -> list[int]:
        return [depth(vars(owner)[name]) for owner, name in places]

    originals = [vars(owner)[name] for owner, name in places]
    plain = Seen()
    by_patches, in_registry_then = depths(), len(HookRegistry._hooks)
    with _hooking.through_registry():
        plain.source.install(plain.bus.publish)
    still = depths()
    plain.close()
    restored = [vars(owner)[name] is original for (owner, name), original in zip(places, originals, strict=True)]
    with _hooking.through_registry():
        seen = Seen()
    before_apply, registered = depths(), sorted(HookRegistry._hooks)
    HookRegistry.apply_hooks()
    HookRegistry.apply_hooks()
    applied = depths()
    seen.close()
    return {"by_patches": by_patches, "in_registry_then": in_registry_then, "still": still, "restored": restored,
            "before_apply": before_apply, "registered": registered, "applied": applied,
            "restored_again": [vars(owner)[name] is original
                               for (owner, name), original in zip(places, originals, strict=True)],
            "left": sorted(HookRegistry._hooks), "patched": sorted(HookRegistry._patched)}


def depth(method: Any) -> int:
    """How many wrappers are around a method."""
    found = 0
    while hasattr(method, "__wrapped__"):
        method, found = method.__wrapped__, found + 1
    return found
