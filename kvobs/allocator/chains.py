"""The KV cache inside a recorded demand: tensors that grew by being replaced, and the same growing in another way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from kvobs.allocator import growth as ways
from kvobs.allocator import program as ops
from kvobs.allocator.demand import RecordedDemand
from kvobs.allocator.growth import Growth
from kvobs.allocator.recording import Stacks

Frames = tuple[tuple[str, int, str], ...]
IsKV = Callable[[Frames], bool]
# A line that makes K and V frees both old tensors after both new ones at the latest.
BURST = 2


class NotDerivable(ValueError):
    """A recorded KV cache cannot be made to grow otherwise; ``str()`` is one whole sentence."""


@dataclass(slots=True)
class Chain:
    """One tensor over its life. ``handles``: the allocation of each step. ``lengths``: tokens after each step.
    ``trials``: the handles of requests to grow that failed, and what they would have replaced; ``tried``: their tokens.
    """

    handles: list[int]
    token_bytes: int = 0
    lengths: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    trials: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Regrown:
    """What changed with the way to grow. ``copied_bytes_*``: moved from old tensors to new ones over the history.
    ``tail_bytes``: allocated and without a token at the end of every tensor. ``left``: KV allocations that stay as
    they were recorded because they do not grow, or not by whole tokens.
    """

    growth: str
    chains: int
    token_bytes: tuple[int, ...]
    copied_bytes_before: int
    copied_bytes_after: int
    tail_bytes: int
    left: int


def regrow(demand: RecordedDemand, way: Growth, stacks: Stacks, is_kv: IsKV) -> tuple[RecordedDemand, Regrown]:
    """The same demand with its KV tensors growing in another way; everything else stays where it was.

    A token is the smallest growth of a tensor. ``is_kv`` decides by the frames of a stack, innermost first.

    Raises:
        NotDerivable: no allocation is KV, or none of them grows by whole tokens.
    """
    sites = _sites(demand, stacks, is_kv)
    sizes = {demand.program.handle[index]: demand.program.size[index]
             for index, op in enumerate(demand.program.op) if op == ops.ALLOC}
    found = _chains(demand, sites, sizes)
    chains = [chain for chain in found if _measure(chain, sizes)]
    if not sites:
        raise NotDerivable("No allocation of this file is recognised as KV cache by its frames, so that no other way "
                           "to grow can be put in its place.")
    if not chains:
        raise NotDerivable(f"None of the {len(sites)} KV allocations of this file grows by whole tokens, so that no "
                           "other way to grow can be put in their place.")
    copied = sum(before * chain.token_bytes for chain in chains for before in chain.lengths[:-1])
    return _rewrite(demand, way, chains), Regrown(
        str(way), len(chains), tuple(sorted({chain.token_bytes for chain in chains})), copied,
        sum(ways.copied_bytes(way, chain.lengths, chain.token_bytes) for chain in chains),
        sum(ways.tail_bytes(way, chain.lengths, chain.token_bytes) for chain in chains),
        len(sites) - sum(len(chain.handles) + len(chain.trials) for chain in chains))


def _sites(demand: RecordedDemand, stacks: Stacks, is_kv: IsKV) -> dict[int, object]:
    """The line of code that made each KV allocation: the innermost frame that is KV by itself, else the stack."""
    by_stack: dict[int, object] = {}
    for stack in set(demand.stack):
        frames = stacks.of(stack)
        if frames and is_kv(frames):
            by_stack[stack] = next((frame for frame in frames if is_kv((frame,))), stack)
    return {handle: by_stack[stack] for handle, stack in enumerate(demand.stack) if stack in by_stack}


def _chains(demand: RecordedDemand, sites: dict[int, object], sizes: dict[int, int]) -> list[Chain]:
    """Tensors of the same line where one was freed directly after a larger one had been made."""
    program, failed = demand.program, {demand.program.handle[index] for index in demand.failed}
    chain_of: dict[int, Chain] = {}
    fresh: dict[object, deque[int]] = {}
    heads: dict[object, dict[int, None]] = {}  # alive and not replaced, in order of allocation
    for op, handle in zip(program.op, program.handle, strict=True):
        if op not in (ops.ALLOC, ops.FREE) or handle not in sites:
            continue
        site = sites[handle]
        alive = heads.setdefault(site, {})
        if op == ops.ALLOC and handle in failed:
            smaller = [one for one in alive if sizes[one] < sizes[handle]]
            if smaller:
                old = max(smaller, key=lambda one: sizes[one])  # of equal ones the first
                chain_of[old].trials[handle] = old
        elif op == ops.ALLOC:
            fresh.setdefault(site, deque(maxlen=BURST)).append(handle)
            alive[handle] = None
            chain_of[handle] = Chain([handle])
        elif handle not in failed:
            _replace(handle, fresh.get(site, deque()), sizes, chain_of)
            alive.pop(handle, None)
    return list({id(chain): chain for chain in chain_of.values()}.values())


def _replace(old: int, fresh: deque[int], sizes: dict[int, int], chain_of: dict[int, Chain]) -> None:
    """Let the fresh tensor that is a little larger than a freed one continue its chain."""
    if old in fresh:
        fresh.remove(old)
    larger = [one for one in fresh if one > old and sizes[one] > sizes[old]]
    if larger:
        new = min(larger, key=lambda one: sizes[one])  # of equal ones the first
        fresh.remove(new)
        chain = chain_of[new] = chain_of[old]
        chain.handles.append(new)


def _measure(chain: Chain, sizes: dict[int, int]) -> bool:
    """Find a chain's token and lengths; false where it does not grow, or not by whole tokens."""
    steps = [sizes[handle] for handle in chain.handles]
    tried = [sizes[handle] for handle in chain.trials]
    growths = [after - before for before, after in pairwise(steps)]
    growths += [sizes[new] - sizes[old] for new, old in chain.trials.items()]
    token = chain.token_bytes = min(growths, default=0)
    if token <= 0 or any(size % token for size in steps + tried):
        return False
    chain.lengths, chain.tried = [size // token for size in steps], [size // token for size in tried]
    return True


def _rewrite(demand: RecordedDemand, way: Growth, chains: list[Chain]) -> RecordedDemand:
    """Every operation again, with those of the chains replaced by what the way to grow asks for."""
    made = RecordedDemand(refused=list(demand.refused), history=demand.history, notes=list(demand.notes))
    place = {handle: (chain, index) for chain in chains for index, handle in enumerate(chain.handles)}
    trial = {handle: chain.handles.index(old) for chain in chains for handle, old in chain.trials.items()}
    tried = {handle: chain for chain in chains for handle in chain.trials}
    plans = {id(chain): _plan(way, chain) for chain in chains}
    held: dict[int, list[int]] = {id(chain): [] for chain in chains}
    doomed: dict[int, list[int]] = {}  # by a recorded handle: what its free gives back
    uses: dict[int, list[int]] = {}
    failed = set(demand.failed)
    program = demand.program
    for at, (op, handle, size, stream, pool) in enumerate(
            zip(program.op, program.handle, program.size, program.stream, program.pool, strict=True)):
        event = demand.event[at]
        if op == ops.ALLOC:
            stack = demand.stack[handle]
            sizes: tuple[int, ...] = (size,)
            if handle in place:
                chain, index = place[handle]
                sizes = plans[id(chain)][index]
            elif handle in tried:
                chain = tried[handle]
                sizes = _trial(way, chain, trial[handle], size)
            if at in failed:
                made.failed.extend(range(len(made.program), len(made.program) + len(sizes)))
            new = [made.allocate(event, each, stream, pool, stack) for each in sizes]
            if handle in place:
                if way.copies and new and index:
                    doomed[chain.handles[index - 1]] = held[id(chain)]
                    held[id(chain)] = []
                held[id(chain)].extend(new)
            else:
                doomed[handle] = new
        elif op == ops.FREE:
            gone = doomed.pop(handle, [])
            if handle in place and place[handle][1] == len(place[handle][0].handles) - 1:
                gone = gone + held.pop(id(place[handle][0]))
            for each in gone:
                for other in uses.get(handle, ()):
                    made.add(event, ops.RECORD_STREAM, each, stream=other)
                made.add(event, ops.FREE, each)
        elif op == ops.RECORD_STREAM:
            uses.setdefault(handle, []).append(stream)
        else:
            made.add(event, op, handle, size, stream, pool)
    return made


def _plan(way: Growth, chain: Chain) -> list[tuple[int, ...]]:
    if way.kind == ways.STATIC:  # the whole length is that which was tried for
        return ways.plan(way, chain.lengths + chain.tried, chain.token_bytes)[:len(chain.lengths)]
    return ways.plan(way, chain.lengths, chain.token_bytes)


def _trial(way: Growth, chain: Chain, index: int, size: int) -> tuple[int, ...]:
    """What a request to grow that failed would have been."""
    if way.kind == ways.STATIC:
        return ()
    return ways.plan(way, [*chain.lengths[:index + 1], size // chain.token_bytes], chain.token_bytes)[-1]
