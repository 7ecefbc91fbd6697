"""Samples from CSV text: a column each for the signal and the latency, and ``t``, seconds, where there is one."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator

from kvobs.slo.calibration._windows import Sample

TIME = "t"
MOST_ROWS = 50_000_000
_UNITS = {"ns": (1e9, "nanoseconds"), "us": (1e6, "microseconds"), "ms": (1e3, "milliseconds")}


class Unreadable(ValueError):
    """A CSV was refused; ``str()`` is one clause that says where and why."""


def latency_unit(column: str) -> tuple[float, str]:
    """How many of a column's unit are a second, and the unit: what the name ends with (``_ms``, ``_us``, ``_ns``)."""
    return _UNITS.get(column.rpartition("_")[2], (1.0, "seconds"))


def read_csv(lines: Iterable[str], signal: str, latency: str) -> Iterator[Sample]:
    """The samples of a CSV with a header. Without a column ``t`` rows are one second apart.

    An empty cell or ``nan`` is absent. A latency may be infinite (it never came), a signal may not.

    Raises:
        Unreadable: a column is missing, a cell is no number, time runs backwards, or there are too many rows.
    """
    reader = csv.reader(lines)
    try:
        header = next(reader, None)
        if header is None:
            raise Unreadable("it is empty; its first line must name the columns")
        header = [name.strip() for name in header]
        signal_at, latency_at = _column(header, signal), _column(header, latency)
        time_at = _column(header, TIME) if TIME in header else None
        per_second, _ = latency_unit(latency)
        before, count = -math.inf, 0
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise Unreadable(f"line {reader.line_num} has {len(row)} cells, the header {len(header)}")
            if count == MOST_ROWS:
                raise Unreadable(f"it has more than {MOST_ROWS:,} rows")
            line = reader.line_num
            value, took = _number(row[signal_at], signal, line), _number(row[latency_at], latency, line)
            at = float(count) if time_at is None else _number(row[time_at], TIME, line)
            if value is not None and math.isinf(value):
                raise Unreadable(f"line {line} has an infinite {signal}")
            if took is not None and took < 0:
                raise Unreadable(f"line {line} has a {latency} below zero")
            if at is None or not before <= at < math.inf:
                what = "lacks a time" if at is None else f"has the time {at:g} after {before:g}"
                raise Unreadable(f"line {line} {what}; rows must be in the order of {TIME}, in seconds")
            before = at
            count += 1
            yield Sample(at, value, None if took is None else took / per_second)
    except csv.Error as error:
        raise Unreadable(f"line {reader.line_num} is not CSV ({error})") from None


def _column(header: list[str], name: str) -> int:
    if header.count(name) == 1:
        return header.index(name)
    if name in header:
        raise Unreadable(f"the column {name!r} is there {header.count(name)} times")
    raise Unreadable(f"there is no column {name!r}; it has {', '.join(header[:20])}" + ", ..." * (len(header) > 20))


def _number(cell: str, column: str, line: int) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        if not cell.strip():
            return None
        raise Unreadable(f"line {line} has {cell[:40]!r} under {column}, which is no number") from None
    return None if value != value else value
