"""Where ``kvobs calibrate`` gets its samples: a CSV file, or stores, joined by second."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvobs.cli._errors import Refused

if TYPE_CHECKING:
    from kvobs.slo.calibration import Question, Sample, Windows
    from kvobs.store import Point, StoreReader

SECOND = 10**9
ALLOCATION = "kvobs.alloc.latency"
_OF_TURNS = {"gen_ai.server.time_to_first_token": "ttft_ns", "gen_ai.server.time_per_output_token": "tpot_ns"}
LATENCIES = (ALLOCATION, *_OF_TURNS)
_ATTRIBUTES = {name: ("device",) if name == ALLOCATION else ("model", "device", "cache") for name in LATENCIES}
_MAGIC = b"SQLite format 3\x00"
Seconds = dict[tuple[str, int], float]  # by process and Unix second


def collect(path: Path, question: Question, where: Sequence[str]) -> tuple[Windows, list[str]]:
    """The windows of what is at a path, and sentences about how it was read.

    Raises:
        Refused: it cannot be read, or does not have what was asked for.
    """
    from kvobs.slo.calibration import Unreadable, in_windows, latency_unit, read_csv

    width_s = question.window_ns / SECOND
    if not path.exists():
        raise Refused(f"There is nothing at {path}; name a store, a directory of stores or a CSV file.")
    try:
        if path.is_dir() or _is_store(path):
            samples, notes = _from_store(path, question, _pairs(where))
            return in_windows(samples, width_s), notes
        if where:
            raise Refused("The option --where belongs to stores; a CSV file has one column for the signal.")
        with path.open(encoding="utf-8-sig", newline="") as lines:
            windows = in_windows(read_csv(lines, question.signal, question.latency), width_s)
        return windows, [f"The column {question.latency} is read as {latency_unit(question.latency)[1]}."]
    except (Unreadable, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read as CSV: {error}.") from None
    except OSError as error:
        raise Refused(f"{path} cannot be read ({(error.strerror or str(error)).lower()}).") from None


def _is_store(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _pairs(where: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in where:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise Refused(f"--where: {text!r} is no attribute=value.")
        found[name] = value
    return found


def _from_store(path: Path, question: Question, where: Mapping[str, str]) -> tuple[list[Sample], list[str]]:
    from kvobs.slo.calibration import Sample
    from kvobs.store import StoreError, StoreReader

    attributes = _checked(question)
    for name in where:
        if name not in (*attributes, *_ATTRIBUTES[question.latency]):
            raise Refused(f"--where: neither {question.signal} nor {question.latency} has an attribute {name!r}; "
                          f"allowed are {', '.join(dict.fromkeys((*attributes, *_ATTRIBUTES[question.latency])))}.")
    try:
        reader = StoreReader(path)
        reader.refuse_problems()
        signals = _signals(reader, question.signal, {key: where[key] for key in where if key in attributes})
        latencies, notes = _latencies(reader, question, where)
    except StoreError as error:
        raise Refused(str(error)) from None
    if not signals or not latencies:
        missing = question.latency if signals else question.signal
        raise Refused(f"{path} has no values of {missing}{' for this --where' * bool(where)}.")
    numbers = {process: number for number, process in enumerate(sorted({key[0] for key in signals | latencies}))}
    return [Sample(second, signals.get((process, second)), latencies.get((process, second)), numbers[process])
            for process, second in sorted(signals.keys() | latencies.keys())], notes


def _checked(question: Question) -> tuple[str, ...]:
    """The attributes of the signal."""
    from kvobs.catalog import BY_NAME

    row = BY_NAME.get(question.signal)
    if row is None or row.kind != "gauge":
        gauges = [name for name, one in BY_NAME.items() if one.kind == "gauge"]
        near = difflib.get_close_matches(question.signal, gauges, n=1, cutoff=0.5)
        raise Refused(f"--signal: {question.signal} is no gauge of the catalog"
                      + (f"; did you mean {near[0]}?" if near else "; kvobs catalog lists them."))
    if question.latency not in LATENCIES:
        raise Refused(f"--latency: of a store {', '.join(LATENCIES)} are allowed, and not {question.latency}.")
    return row.attributes


def _signals(reader: StoreReader, name: str, where: Mapping[str, str]) -> Seconds:
    points = [point for point in reader.points(name) if _fits(point.attributes, where)]
    series = {tuple(sorted(point.attributes.items())) for point in points}
    if len(series) > 1:
        shown = ["; ".join(f"{key}={value}" for key, value in one) for one in sorted(series)[:4]]
        raise Refused(f"{name} has {len(series)} series here ({', or '.join(shown)}{', ...' * (len(series) > 4)}): "
                      "choose one by --where.")
    return _highest((point.process, point.wall_ns // SECOND, point.value) for point in points
                    if math.isfinite(point.value))


def _latencies(reader: StoreReader, question: Question, where: Mapping[str, str]) -> tuple[Seconds, list[str]]:
    if question.latency in _OF_TURNS:
        return _turns(reader, _OF_TURNS[question.latency], where), []
    rows = reader.rows("allocators", ["wall_ns", "device", "allocations", "latency_max_ns"])
    found = _highest((process, wall_ns // SECOND, longest / SECOND)
                     for process, wall_ns, device, allocations, longest in rows
                     if allocations and _fits({"device": device}, where))
    if found:
        return found, []
    return _by_bucket([point for point in reader.points(ALLOCATION) if _fits(point.attributes, where)], question)


def _turns(reader: StoreReader, column: str, where: Mapping[str, str]) -> Seconds:
    """Latencies of turns by the second in which they were known."""
    rows = reader.rows("turns", ["wall_ns", "wall_start_ns", "model", "device", "cache", column])
    return _highest((process, (start_ns + took_ns if column == "ttft_ns" else wall_ns) // SECOND, took_ns / SECOND)
                    for process, wall_ns, start_ns, model, device, cache, took_ns in rows
                    if took_ns is not None and _fits({"model": model, "device": device, "cache": cache}, where))


def _by_bucket(points: Sequence[Point], question: Question) -> tuple[Seconds, list[str]]:
    """Of latencies that were counted by bucket: the upper bound of the highest bucket that grew since the last point.

    Whether it is above the SLO is exact where that is a bucket's bound.
    """
    from kvobs.catalog import LATENCY_BOUNDS_NS
    from kvobs.config import duration_text

    if points and question.slo_ns not in LATENCY_BOUNDS_NS:
        raise Refused("--slo: these allocations were counted by bucket, so that allowed are "
                      f"{', '.join(duration_text(bound) for bound in LATENCY_BOUNDS_NS)}.")
    before: dict[tuple[str, str], Point] = {}
    grown: list[tuple[str, int, float]] = []
    for point in points:
        key = (point.process, str(point.attributes))
        last = before.get(key)
        before[key] = point
        if last is None or last.buckets is None or point.buckets is None or point.bounds is None:
            continue
        bounds = (*point.bounds, math.inf)
        slowest = max((bound for bound, now, then in zip(bounds, point.buckets, last.buckets, strict=True)
                       if now > then), default=None)
        if slowest is not None:
            grown.append((point.process, point.wall_ns // SECOND, slowest))
    return _highest(grown), ["The allocations were counted by bucket: which windows missed is exact, how far is not "
                             "known."]


def _fits(attributes: Mapping[str, str], where: Mapping[str, str]) -> bool:
    return all(attributes[key] == value for key, value in where.items() if key in attributes)


def _highest(values: Iterable[tuple[str, int, float]]) -> Seconds:
    found: Seconds = {}
    for process, second, value in values:
        key = (process, second)
        if not value <= found.get(key, -math.inf):
            found[key] = value
    return found
