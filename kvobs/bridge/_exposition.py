"""Read Prometheus and OpenMetrics text, line by line and in bounded memory; what is not well formed is counted.

Sources: "Exposition formats" of the Prometheus documentation (text format 0.0.4) and the OpenMetrics 1.0 specification.
Only samples that are wanted are kept; all others are recognised by name and counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

MAX_LINE_BYTES = 65_536
MAX_SAMPLES = 10_000
MAX_LABELS = 64
NOT_FINITE, MALFORMED, DUPLICATE, BOUND = "not_finite", "malformed", "duplicate", "bound"

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"[ \t]*')
_END = re.compile(r"[ \t]*(?:,[ \t]*)?}")
_NUMBER = r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[iI]nf(?:inity)?|INF|[nN][aA][nN])"
_VALUE = re.compile(rf"[ \t]*({_NUMBER})(?:[ \t]+{_NUMBER})?[ \t]*(?:# \{{.*)?")
_ESCAPE = re.compile(r'\\([\\n"])')
_UNESCAPED = {"\\": "\\", "n": "\n", '"': '"'}


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One sample: its name as written, its labels sorted by name, and a finite value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Exposition(msgspec.Struct, frozen=True):
    """What one answer held: the samples that were wanted, how many were not, and how many of which were dropped.

    ``whole`` says that the last line had an end, ``eof`` that it was OpenMetrics' ``# EOF``.
    """

    samples: tuple[Sample, ...]
    ignored: int
    dropped: dict[str, int]
    whole: bool
    eof: bool


def lines(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines without their end, and whether they had one. Of one above ``MAX_LINE_BYTES`` only some more than that."""
    rest, cutting = b"", False
    for chunk in chunks:
        *whole, tail = chunk.split(b"\n")
        for line in whole:
            if not cutting:
                yield rest + line[:MAX_LINE_BYTES + 1], True
            rest, cutting = b"", False
        if not cutting:
            rest += tail
            if len(rest) > MAX_LINE_BYTES:
                yield rest, True
                rest, cutting = b"", True
    if rest or cutting:
        yield rest, False


def parse(chunks: Iterable[bytes], wanted: Callable[[str], bool]) -> Exposition:
    """Read an answer, whose body comes in ``chunks``; samples whose name is ``wanted`` are kept."""
    kept: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    dropped: Counter[str] = Counter()
    ignored, whole, eof = 0, True, False
    for raw, whole in lines(chunks):
        eof = False  # what has more after it is no end
        if not raw or raw.isspace():
            continue
        if raw[:1] == b"#":
            eof = whole and raw.rstrip() == b"# EOF"
            continue
        try:
            line = raw.decode().strip(" \t\r")
        except UnicodeDecodeError:
            dropped[MALFORMED] += 1
            continue
        name = _NAME.match(line)
        if (name is None or not whole or len(raw) > MAX_LINE_BYTES
                or line[name.end():name.end() + 1] not in ("{", " ", "\t")):
            dropped[MALFORMED] += 1
        elif not wanted(name[0]):
            ignored += 1
        elif len(kept) >= MAX_SAMPLES:
            dropped[BOUND] += 1
        else:
            _keep(line, name[0], kept, dropped)
    return Exposition(tuple(kept.values()), ignored, dict(dropped), whole, eof)


def _keep(line: str, name: str, kept: dict[tuple[str, tuple[tuple[str, str], ...]], Sample],
          dropped: Counter[str]) -> None:
    sample = read_sample(line, name)
    if sample is None:
        dropped[MALFORMED] += 1
    elif not math.isfinite(sample.value):
        dropped[NOT_FINITE] += 1
    elif (sample.name, sample.labels) in kept:
        dropped[DUPLICATE] += 1
    else:
        kept[sample.name, sample.labels] = sample


def read_sample(line: str, name: str) -> Sample | None:
    """The sample that a line tells, which begins with ``name``; None when it is not well formed."""
    labels: dict[str, str] = {}
    at = len(name)
    if line[at:].lstrip(" \t").startswith("{"):
        at = line.index("{", at) + 1
        while (end := _END.match(line, at)) is None:
            label = _LABEL.match(line, at)
            if label is None or label[1] in labels or len(labels) >= MAX_LABELS:
                return None
            labels[label[1]] = _ESCAPE.sub(lambda found: _UNESCAPED[found[1]], label[2])
            at = label.end()
            if line[at:at + 1] == ",":
                at += 1
            elif line[at:at + 1] != "}":
                return None
        if end[0].lstrip(" \t").startswith(",") and (not labels or line[at - 1] == ","):
            return None  # a comma that follows no label
        at = end.end()
    value = _VALUE.fullmatch(line, at)
    return Sample(name, tuple(sorted(labels.items())), float(value[1])) if value is not None else None
