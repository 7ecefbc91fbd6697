"""Requests over time: Azure's CSV and Mooncake's JSONL files of serving traces. Read line by line; bounded.

Azure: ``TIMESTAMP,ContextTokens,GeneratedTokens`` (AzurePublicDataset). Mooncake: one JSON object per line with
``timestamp`` (ms), ``input_length``, ``output_length`` and ``hash_ids``, one per 512 tokens of the prompt; equal ids
are the same prefix.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOONCAKE_CHUNK = 512  # tokens of a hash id
MOST_REQUESTS = 1_000_000
MOST_TOKENS = 10_000_000  # of a request
MOST_LINE = 4_000_000  # characters
MOST_DAYS = 31
_NS = 10**9
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?")


class TraceError(ValueError):
    """A trace was refused; ``str()`` is one whole sentence."""


class Request(msgspec.Struct, frozen=True, gc=False):
    """A request as it arrives: tokens of its prompt and of the output that it asks for.

    ``chunks`` name its tokens from the first on, ``Trace.chunk_tokens`` each, as far as others may share them; they
    are distinct and may go on into the output.
    """

    arrival_ns: int
    prompt: int
    output: int
    chunks: tuple[int, ...] = ()


class Trace(msgspec.Struct, frozen=True):
    """Requests in the order of their arrival; ``chunk_tokens`` is a multiple of 16."""

    name: str
    requests: tuple[Request, ...]
    chunk_tokens: int = MOONCAKE_CHUNK


def read_trace(path: Path, *, rate: float = 1.0, limit: int | None = None) -> Trace:
    """The requests of a file, the first ``limit`` of them, arriving ``rate`` times as fast.

    Raises:
        TraceError: one sentence: which line, what is wrong, what is allowed.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline(MOST_LINE + 1)
            file.seek(0)
            rows = _mooncake(file, path) if first.lstrip().startswith("{") else _azure(file, path)
            requests = _taken(rows, path, MOST_REQUESTS if limit is None else min(limit, MOST_REQUESTS), limit)
    except OSError as error:
        raise TraceError(f"The trace {path} cannot be read: {(error.strerror or str(error)).lower()}.") from None
    except UnicodeDecodeError:
        raise TraceError(f"The trace {path} is not text in UTF-8.") from None
    if not requests:
        raise TraceError(f"The trace {path} has no requests.")
    return Trace(path.name, scaled(requests, rate))


def scaled(requests: list[Request], rate: float) -> tuple[Request, ...]:
    """In the order of arrival, from time 0 on, ``rate`` times as fast.

    Raises:
        TraceError: that takes longer than can be simulated.
    """
    requests.sort(key=lambda request: request.arrival_ns)
    began = requests[0].arrival_ns
    if (requests[-1].arrival_ns - began) / rate > MOST_DAYS * 86_400 * _NS:
        raise TraceError(f"The requests arrive over more than {MOST_DAYS} days; --rate makes that shorter.")
    return tuple(msgspec.structs.replace(one, arrival_ns=round((one.arrival_ns - began) / rate)) for one in requests)


def _taken(rows: Iterator[Request], path: Path, most: int, limit: int | None) -> list[Request]:
    found: list[Request] = []
    for request in rows:
        if len(found) == most:
            if limit is not None and limit <= MOST_REQUESTS:
                break
            raise TraceError(f"The trace {path} has more than {MOST_REQUESTS:,} requests; --limit takes the first.")
        found.append(request)
    return found


# -- Azure -----------------------------------------------------------------------------------------------


def _azure(file: TextIO, path: Path) -> Iterator[Request]:
    rows = csv.reader(_lines(file, path))
    try:
        header = next(rows, [])
        if header != AZURE_HEADER:
            raise TraceError(f"The trace {path} begins with neither Azure's header {','.join(AZURE_HEADER)} nor a JSON "
                             "object as Mooncake's files do.")
        for row in rows:
            if row:
                yield _azure_row(row, f"line {rows.line_num} of {path}")
    except csv.Error as error:
        raise TraceError(f"In line {rows.line_num} of {path}, the CSV is broken: {error}.") from None


def _azure_row(row: list[str], where: str) -> Request:
    if len(row) != len(AZURE_HEADER):
        raise TraceError(f"In {where}, the number of fields is {len(row)}; allowed are {len(AZURE_HEADER)}.")
    match = _TIME.fullmatch(row[0])
    try:
        if match is None:
            raise ValueError
        whole = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
        arrival = int(whole.timestamp()) * _NS + int((match[2] or "0").ljust(9, "0"))
    except ValueError:
        raise TraceError(f"In {where}, the time is {row[0][:40]!r}; allowed is one such as "
                         "2023-11-16 18:15:46.6805900.") from None
    return Request(arrival, _tokens(row[1], AZURE_HEADER[1], where, least=1), _tokens(row[2], AZURE_HEADER[2], where))


# -- Mooncake --------------------------------------------------------------------------------------------


class _Row(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


_DECODE = msgspec.json.Decoder(_Row)


def _mooncake(file: TextIO, path: Path) -> Iterator[Request]:
    for number, line in enumerate(_lines(file, path), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = _DECODE.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"In {where}, the request cannot be read: {str(error).rstrip('.')}.") from None
        if not 0 <= row.timestamp <= 1e13:
            raise TraceError(f"In {where}, timestamp is {row.timestamp!r}; allowed are 0 to 1e13 ms.")
        prompt = _tokens(row.input_length, "input_length", where, least=1)
        if len(row.hash_ids) > -(-prompt // MOONCAKE_CHUNK):
            raise TraceError(f"In {where}, the number of hash_ids is {len(row.hash_ids)} for {prompt} tokens; allowed "
                             f"is one per {MOONCAKE_CHUNK}.")
        # The last id may name a part of a chunk: only whole ones are shared here.
        yield Request(round(row.timestamp * 1e6), prompt, _tokens(row.output_length, "output_length", where),
                      distinct(row.hash_ids[:prompt // MOONCAKE_CHUNK]))


def distinct(chunks: list[int]) -> tuple[int, ...]:
    """Up to the first that was there before: a prefix does not hold itself."""
    kept = dict.fromkeys(chunks)
    return tuple(kept) if len(kept) == len(chunks) else tuple(chunks[:_first_repeat(chunks)])


def _first_repeat(chunks: list[int]) -> int:
    seen: set[int] = set()
    return next(index for index, chunk in enumerate(chunks) if chunk in seen or seen.add(chunk))  # type: ignore[func-returns-value]


# -- values ----------------------------------------------------------------------------------------------


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of a file, none of them endless."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise TraceError(f"Line {number} of {path} is longer than {MOST_LINE:,} characters.")
        yield line


def _tokens(value: Any, name: str, where: str, least: int = 0) -> int:
    """A number of tokens; an output of 0 counts as 1, since every request that a server finishes has a token."""
    text = str(value)
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or not least <= int(text) <= MOST_TOKENS:
        raise TraceError(f"In {where}, {name} is {text[:40]!r}; allowed are {least} to {MOST_TOKENS:,}.")
    return max(int(text), 1)
