"""How a KV cache grows, and what each way asks of an allocator.

``cat``: every step allocates the grown tensor, copies the old one into it and frees that (``torch.cat``). ``static``:
the whole length once. ``chunked:N``: room for N more tokens at a time, copying when the room is used up. ``paged:N``:
a new block of N tokens when the last one is full; nothing is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvobs.allocator import program as ops
from kvobs.allocator.program import Program

CAT, STATIC, CHUNKED, PAGED = ("cat", "static", "chunked", "paged")
LARGEST_STEP = 1 << 20  # tokens of a chunk or a block


@dataclass(frozen=True, slots=True)
class Growth:
    """One way to grow. ``tokens``: of a chunk or a block, 0 for cat and static."""

    kind: str
    tokens: int = 0

    @property
    def copies(self) -> bool:
        """Whether growing replaces what was there."""
        return self.kind in (CAT, CHUNKED)

    def __str__(self) -> str:
        return f"{self.kind}:{self.tokens}" if self.tokens else self.kind


def parse(text: str) -> Growth:
    """``cat``, ``static``, ``chunked:N`` or ``paged:N``.

    Raises:
        ValueError: anything else.
    """
    kind, separator, tokens = text.strip().partition(":")
    if kind in (CAT, STATIC) and not separator:
        return Growth(kind)
    if kind in (CHUNKED, PAGED) and tokens.isdecimal() and 0 < int(tokens) <= LARGEST_STEP:
        return Growth(kind, int(tokens))
    raise ValueError(f"'{text}' is no way to grow; cat, static, chunked:N and paged:N are, with N tokens from 1 to "
                     f"{LARGEST_STEP}")


def plan(growth: Growth, lengths: Sequence[int], token_bytes: int) -> list[tuple[int, ...]]:
    """The bytes of each new allocation, per step, of one tensor that has ``lengths`` tokens after its steps.

    Where the way copies, a step that allocates replaces everything before; otherwise it adds to it. A length that does
    not exceed an earlier one allocates nothing, except with cat, which makes a new tensor in every step.
    """
    if growth.kind == STATIC:
        return [(max(lengths) * token_bytes,) if index == 0 else () for index in range(len(lengths))]
    if growth.kind == CAT:
        return [(length * token_bytes,) for length in lengths]
    steps: list[tuple[int, ...]] = []
    units = 0
    for length in lengths:
        wanted = -(-length // growth.tokens)
        if wanted <= units:
            steps.append(())
        elif growth.kind == CHUNKED:
            steps.append((wanted * growth.tokens * token_bytes,))
        else:
            steps.append((growth.tokens * token_bytes,) * (wanted - units))
        units = max(units, wanted)
    return steps


def copied_bytes(growth: Growth, lengths: Sequence[int], token_bytes: int) -> int:
    """The bytes of one tensor that growing moves from its old place to its new one."""
    if not growth.copies:
        return 0
    steps = plan(growth, lengths, token_bytes)
    return sum(before * token_bytes for (before, _), step in zip(pairwise(lengths), steps[1:], strict=True) if step)


def tail_bytes(growth: Growth, lengths: Sequence[int], token_bytes: int) -> int:
    """The bytes of one tensor that are allocated after its last step and hold no token."""
    steps = plan(growth, lengths, token_bytes)
    held = next(sum(step) for step in reversed(steps) if step) if growth.copies else sum(map(sum, steps))
    return held - lengths[-1] * token_bytes


def kv_program(layers: int, token_bytes: int, turns: Sequence[tuple[int, int]], growth: Growth,
               sessions: int = 1) -> Program:
    """What the KV caches of whole conversations ask for, without anything else.

    ``token_bytes``: of K and V together in one layer. ``turns``: tokens of the prompt and new tokens of each turn; the
    prompt is one step of growth, every new token another. Sessions take their turns in rotation, and each gives its
    cache back after its last turn.

    Raises:
        ValueError: an odd or negative size, or nothing to generate.
    """
    if layers < 1 or sessions < 1 or token_bytes < 2 or token_bytes % 2:
        raise ValueError("A KV cache has at least one layer and session, and an even number of bytes per token")
    lengths, ends = _lengths(turns)
    steps = plan(growth, lengths, token_bytes // 2)
    found = Program()
    held: list[list[list[int]]] = [[[] for _ in range(2 * layers)] for _ in range(sessions)]
    handle, first = 0, 0
    for end in ends:
        for tensors in held:
            for step in steps[first:end]:
                for tensor in tensors:
                    old = list(tensor) if growth.copies and step else []
                    for size in step:
                        found.add(ops.ALLOC, handle, size)
                        tensor.append(handle)
                        handle += 1
                    for gone in old:
                        found.add(ops.FREE, gone)
                        tensor.remove(gone)
            if end == len(steps):
                for tensor in tensors:
                    for gone in tensor:
                        found.add(ops.FREE, gone)
        first = end
    return found


def _lengths(turns: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The length after every step, and how many steps have passed at the end of each turn."""
    lengths: list[int] = []
    ends: list[int] = []
    length = 0
    for prompt, new in turns:
        if prompt < 0 or new < 0 or prompt + new == 0:
            raise ValueError(f"A turn of {prompt} and {new} tokens is not possible")
        for step in [prompt] * (prompt > 0) + [1] * new:
            length += step
            lengths.append(length)
        ends.append(len(lengths))
    if not lengths:
        raise ValueError("A conversation has at least one turn")
    return lengths, ends
