"""Spans as a tree: every span once, whatever their parents say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvobs.cli.traces._model import Span


class Node(msgspec.Struct, frozen=True, gc=False):
    """A span at its place. ``parent`` is a place among the spans; ``last`` has no sibling after it."""

    at: int
    span: Span
    parent: int | None
    depth: int
    last: bool
    children: int
    note: str = ""


def walk(spans: Sequence[Span]) -> Iterator[Node]:
    """Every span once, parents before children, siblings by their beginning.

    A span whose parent is not here is a root, and so is the earliest of those that are each other's ancestors.
    Of several spans with one id the first is the parent.
    """
    parents, notes = _parents(spans)
    children: dict[int | None, list[int]] = {}
    for at in sorted(range(len(spans)), key=lambda at: _order(spans, at)):
        children.setdefault(parents[at], []).append(at)
    roots = children.get(None, [])
    stack = [(at, 0, at == roots[-1]) for at in reversed(roots)]
    while stack:
        at, depth, last = stack.pop()
        own = children.get(at, [])
        stack += [(child, depth + 1, child == own[-1]) for child in reversed(own)]
        yield Node(at, spans[at], parents[at], depth, last, len(own), notes.get(at) or _skew(spans, at, parents[at]))


def begin_of(spans: Sequence[Span]) -> int | None:
    """When the first span begins (Unix nanoseconds)."""
    return min((span.start_ns for span in spans if span.start_ns is not None), default=None)


def _order(spans: Sequence[Span], at: int) -> tuple[bool, int, int]:
    start = spans[at].start_ns
    return start is None, start or 0, at


def _parents(spans: Sequence[Span]) -> tuple[list[int | None], dict[int, str]]:
    """The parent of each span, without cycles, and why some have none."""
    by_id: dict[str, int] = {}
    for at, span in enumerate(spans):
        if span.span_id:
            by_id.setdefault(span.span_id, at)
    found: list[int | None] = []
    notes: dict[int, str] = {}
    for at, span in enumerate(spans):
        parent = span.parent_at if span.parent_at is not None else by_id.get(span.parent_id)
        if span.parent_id and parent is None:
            notes[at] = f"its parent {span.parent_id} is not here"
        found.append(parent)
    for at in _cut(found, spans):
        found[at] = None
        notes[at] = "it is its own ancestor"
    return found, notes


def _cut(parents: Sequence[int | None], spans: Sequence[Span]) -> list[int]:
    """Of each cycle the span that begins first."""
    done = [False] * len(parents)
    cuts = []
    for at in range(len(parents)):
        path: dict[int, None] = {}
        here: int | None = at
        while here is not None and not done[here] and here not in path:
            path[here] = None
            here = parents[here]
        if here is not None and here in path:
            way = list(path)
            cuts.append(min(way[way.index(here):], key=lambda one: _order(spans, one)))
        for one in path:
            done[one] = True
    return cuts


def _skew(spans: Sequence[Span], at: int, parent: int | None) -> str:
    start = spans[at].start_ns
    before = spans[parent].start_ns if parent is not None else None
    if start is not None and before is not None and start < before:
        return "it begins before its parent"
    return ""
