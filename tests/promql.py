"""A reader of PromQL for tests: enough of its grammar to see names, labels, ranges, aggregations and denominators.

Written from the documentation of the language. promtool is the judge of what parses; this tells what is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

AGGREGATIONS = {"sum", "avg", "min", "max", "count", "group", "stddev", "stdvar", "topk", "bottomk", "quantile",
                "count_values"}
_LEVELS = (("or",), ("and", "unless"), ("==", "!=", "<=", "<", ">=", ">"), ("+", "-"), ("*", "/", "%"), ("^",))
_TOKEN = re.compile(r"""\s*(?:(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<range>\[[^\]]*\])
    |(?P<number>(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+|[Ii]nf|NaN)(?![\w]))
    |(?P<name>[A-Za-z_:][\w:]*)
    |(?P<symbol>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},]))""", re.VERBOSE)


@dataclass(frozen=True)
class Node:
    """Part of an expression. ``kind`` is number, string, series, call, aggregation or binary."""

    kind: str
    name: str = ""
    parts: tuple[Node, ...] = ()
    labels: tuple[str, ...] = ()  # what an aggregation keeps
    matchers: tuple[tuple[str, str, str], ...] = ()  # label, operator, value
    range: str = ""
    boolean: bool = False

    def walk(self, above: tuple[Node, ...] = ()) -> Iterator[tuple[Node, tuple[Node, ...]]]:
        """This part and all below it, each with what is above it, the nearest last."""
        yield self, above
        for part in self.parts:
            yield from part.walk((*above, self))

    def series(self) -> Iterator[tuple[Node, tuple[Node, ...]]]:
        """The selectors, each with what is above it."""
        return ((node, above) for node, above in self.walk() if node.kind == "series")


def parse(text: str) -> Node:
    """The expression as a tree.

    Raises:
        ValueError: what is wrong, and where.
    """
    reader = _Reader(text)
    node = reader.binary(0)
    if reader.kind:
        raise ValueError(f"{reader.value!r} is left over in {text!r}")
    return node


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self.kind = self.value = ""
        self.next()

    def next(self) -> str:
        """Step to the next token; returns the one that was there."""
        before = self.value
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            if self._text[self._at:].strip():
                raise ValueError(f"no token at {self._text[self._at:][:30]!r} in {self._text!r}")
            self.kind = self.value = ""
            return before
        self._at, self.kind = match.end(), str(match.lastgroup)
        self.value = match[self.kind]
        return before

    def take(self, value: str) -> None:
        if self.value != value:
            raise ValueError(f"{value!r} is expected where {self.value!r} stands in {self._text!r}")
        self.next()

    def some(self, kind: str) -> str:
        """Step over a token that has to be of a kind."""
        if self.kind != kind:
            raise ValueError(f"a {kind} is expected where {self.value!r} stands in {self._text!r}")
        return self.next()

    def binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.value in _LEVELS[level] and self.kind in ("symbol", "name"):
            operator = self.next()
            boolean = self.value == "bool" and bool(self.next())
            if self.value in ("on", "ignoring"):
                self.next()
                self.names()
                if self.value in ("group_left", "group_right"):
                    self.next()
                    if self.value == "(":
                        self.names()
            left = Node("binary", operator, (left, self.binary(level + 1)), boolean=boolean)
        return left

    def unary(self) -> Node:
        if self.value == "-":
            self.next()
            return Node("binary", "-", (Node("number", "0"), self.unary()))
        node = self.atom()
        if self.kind == "range":
            node = Node(node.kind, node.name, node.parts, node.labels, node.matchers, self.next()[1:-1])
        return node

    def atom(self) -> Node:
        if self.value == "(":
            self.next()
            inside = self.binary(0)
            self.take(")")
            return inside
        if self.kind in ("number", "string"):
            kind = self.kind
            return Node(kind, self.next())
        if self.value == "{":
            return Node("series", "", matchers=self.matchers())
        if self.kind != "name":
            raise ValueError(f"{self.value!r} cannot begin a part of {self._text!r}")
        name = self.next()
        if name in AGGREGATIONS:
            return self.aggregation(name)
        if self.value == "(":
            return Node("call", name, self.arguments())
        return Node("series", name, matchers=self.matchers() if self.value == "{" else ())

    def aggregation(self, name: str) -> Node:
        kept: tuple[str, ...] = ()
        if self.value in ("by", "without"):
            if self.next() == "without":
                raise ValueError(f"without is not read: {self._text!r}")
            kept = self.names()
        arguments = self.arguments()
        if self.value == "by":
            self.next()
            kept = self.names()
        return Node("aggregation", name, arguments, labels=kept)

    def arguments(self) -> tuple[Node, ...]:
        found: list[Node] = []
        self.take("(")
        while self.value != ")":
            found.append(self.binary(0))
            if self.value == ",":
                self.next()
        self.take(")")
        return tuple(found)

    def names(self) -> tuple[str, ...]:
        found: list[str] = []
        self.take("(")
        while self.value != ")":
            found.append(self.some("name"))
            if self.value == ",":
                self.next()
        self.take(")")
        return tuple(found)

    def matchers(self) -> tuple[tuple[str, str, str], ...]:
        found: list[tuple[str, str, str]] = []
        self.take("{")
        while self.value != "}":
            label, operator = self.some("name"), self.some("symbol")
            value = self.some("string")
            found.append((label, operator, value[1:-1]))
            if self.value == ",":
                self.next()
        self.take("}")
        return tuple(found)
