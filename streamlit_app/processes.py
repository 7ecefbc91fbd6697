"""What each process of a store is called, by what it is of an engine, and which comes first. No widget."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvobs import store
from kvobs.store import Process, StoreReader

ROLE = "kvobs.process.role"
CORE = "engine_core"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
LATELY_NS = 2_000_000_000  # a role is told with every point; the last ones say what it is now
WORDS, MODEL = 24, 16  # characters of a name: what was started, and its model


@dataclass(frozen=True)
class Known:
    """What a process is: its engine, role and ranks as it said, and the model of its requests; empty where unknown."""

    engine: str = ""
    role: str = ""
    ranks: str = ""
    model: str = ""


def known(path: str, reader: StoreReader) -> dict[str, Known]:
    """What is known of each process of a store that has any point or request."""
    origins = {one.process: one.record.origin for one in store.requests(reader)}
    roles = {process: _role(path, process, last) for process, (_, last) in store.spans(reader).items()}
    found = {}
    for process in origins.keys() | roles.keys():
        engine, role, ranks = roles.get(process, ("", "", ""))
        origin = origins.get(process)
        found[process] = Known(engine or (origin.source if origin else ""), role, ranks, origin.model if origin else "")
    return found


@functools.lru_cache(maxsize=256)  # an ended process is read once, a running one when it has written
def _role(path: str, process: str, last_ns: int) -> tuple[str, str, str]:
    told = store.series(StoreReader(Path(path), [process]), (ROLE,), last_ns - LATELY_NS, last_ns + 1,
                        processes=[process])
    if not told:
        return "", "", ""
    newest = max(told, key=lambda one: one.wall_ns[-1]).attributes
    return newest.get("engine", ""), newest.get("role", ""), newest.get("ranks", "")


def ordered(processes: Iterable[Process], of: Mapping[str, Known]) -> list[Process]:
    """Running processes first, engine cores before others, then by their start; of ended ones the last to end first."""
    return sorted(processes, key=lambda one: (
        not one.alive, of.get(one.process, Known()).role != CORE,
        (one.started_wall_ns or 0) if one.alive else -(one.ended_wall_ns or one.heartbeat_wall_ns or 0)))


def names(processes: Iterable[Process], of: Mapping[str, Known]) -> dict[str, str]:
    """What each process is called, in order; where two would be called the same, their ids tell them apart."""
    told = {one.process: name_of(one, of.get(one.process, Known())) for one in ordered(processes, of)}
    alike = Counter(told.values())
    return {process: f"{name} · {process[:6]}" if alike[name] > 1 else name for process, name in told.items()}


def name_of(process: Process, what: Known) -> str:
    """Role and ranks, or else what was started; then the model, the number, and whether it has ended."""
    begun = " ".join(Path(word).name if index == 0 else word for index, word in enumerate(process.argv or ()))
    role = f"{what.role} {what.ranks}".strip() or short(begun, WORDS) or "unknown"
    model = short(what.model.rpartition("/")[2], MODEL)
    number = "?" if process.pid is None else str(process.pid)
    return " · ".join(filter(None, (role, model, f"PID {number}", "" if process.alive else "ended")))


def short(name: str, most: int) -> str:
    """A name where there is little room: its beginning and its end."""
    words = " ".join(name.split())
    return words if len(words) <= most else f"{words[:most // 2 - 1]}…{words[most // 2 - most:]}"


def engine_of(path: str, chosen: str | None) -> str:
    """The engine that the chosen process, or every one of all, is of, as people write it; empty where it is of none.

    Raises:
        StoreError: the store cannot be read.
    """
    reader = StoreReader(Path(path))
    of = known(path, reader)
    picked = [one.process for one in reader.processes() if chosen in (None, one.process)]
    engines = {of.get(process, Known()).engine for process in picked}
    return " and ".join(sorted(ENGINES[one] for one in engines)) if engines and engines <= ENGINES.keys() else ""
