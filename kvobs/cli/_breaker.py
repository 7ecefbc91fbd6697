"""``kvobs breaker``: what breakers decided and did, and an operator's word to them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvobs.cli._errors import Refused
from kvobs.cli._output import plain, print_table, say

if TYPE_CHECKING:
    from kvobs import model
    from kvobs.store import Process, Stored, StoreReader

SECOND = 10**9
NONE = "No process of this store had a breaker; KVOBS_BREAKER=observe (or act) gives it one."
breaker = typer.Typer(help="What breakers decided and did, and an operator's word to them.", no_args_is_help=True)

Store = Annotated[Path | None, typer.Argument(help="A store or a directory of stores; default: the configured one.")]
Json = Annotated[bool, typer.Option("--json", help="As a JSON document.")]
Only = Annotated[str | None, typer.Option("--process", help="Only this process (the beginning of its id, or its pid).",
                                          show_default="all")]


@breaker.command()
def status(store: Store = None, as_json: Json = False) -> None:
    """Say which level every breaker is at, and its last decision."""
    reader, processes = _read(store)
    rows = _standing(reader, processes)
    if as_json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        say(NONE)
    else:
        print_table(("process", "scope", "mode", "level", "as of", "last decision"), [
            (f"{row['process'][:8]} {'' if row['alive'] else '(ended)'}".strip(), row["scope"], row["mode"],
             str(row["level"]), _clock(row["wall_ns"]), row["last"] or "none") for row in rows])
        for process, row in {row["process"]: row for row in rows if row["policy"]}.items():
            since = _clock(row["policy_wall_ns"])
            say(plain(f"{process[:8]} policy, since {since}: {row['policy']} {row['refused']}".rstrip()))


@breaker.command()
def log(store: Store = None, process: Only = None, as_json: Json = False) -> None:
    """Tell every decision with its readings and what was not done instead, and what became of each action."""
    from kvobs.store import actions, decisions

    reader, processes = _read(store)
    chosen = {one.process for one in _chosen(processes, process)}
    both: list[Stored[Any]] = [*decisions(reader), *actions(reader)]
    told = sorted((one for one in both if one.process in chosen), key=lambda one: one.wall_ns)
    if as_json:
        print(json.dumps([_document(one) for one in told], indent=2))
        return
    if not told:
        say(NONE)
    for one in told:
        say(f"{_clock(one.wall_ns)} {one.process[:8]} {_sentence(one.record)}")


@breaker.command()
def hindsight(store: Store = None, process: Only = None, as_json: Json = False, horizon: Annotated[str, typer.Option(
        help="Trouble so soon after a level opened was foreseen.")] = "60s") -> None:
    """Tell how often trouble followed when a level opened (precision), and how much of it was foreseen (recall).

    Trouble is an out-of-memory error, a miss of an objective, or more than ten preemptions in ten seconds. In mode
    act, trouble that the breaker prevented has not come, and counts against it.
    """
    from kvobs.breaker import simulator
    from kvobs.config import parse_duration
    from kvobs.store import decisions

    try:
        seconds = parse_duration(horizon) / SECOND
    except ValueError:
        raise Refused(f"--horizon is {horizon!r}; allowed is a duration such as 60s.") from None
    reader, processes = _read(store)
    found = []
    for one in _chosen(processes, process):
        made = [told for told in decisions(reader) if told.process == one.process]
        samples = {metric: [point for point in reader.points(metric) if point.process == one.process]
                   for metric in simulator.WANTED}
        if made:
            found.append(simulator.hindsight(one.process, [told.record for told in made],
                                             [told.wall_ns for told in made], samples, seconds))
    if as_json:
        print(json.dumps([{"process": one.process, "opened": one.opened, "followed": one.followed,
                           "precision": one.precision, "troubles": len(one.troubles), "foreseen": one.foreseen,
                           "recall": one.recall} for one in found], indent=2))
    elif not found:
        say(NONE)
    else:
        print_table(("process", "levels opened", "trouble followed (precision)", "troubles", "foreseen (recall)"), [
            (one.process[:8], str(one.opened), simulator.share_of(one.followed, one.opened), str(len(one.troubles)),
             simulator.share_of(one.foreseen, len(one.troubles))) for one in found])


@breaker.command(name="set")
def hold(level: Annotated[str, typer.Argument(help="0 to 3, or auto: the machine has its way again.")],
         store: Store = None, process: Only = None) -> None:
    """Hold a level in the breakers that run."""
    from kvobs.breaker import LEVELS, Command

    if level != "auto" and level not in map(str, range(len(LEVELS))):
        raise Refused(f"There is no level {level!r}; allowed are 0 to {len(LEVELS) - 1} and auto.")
    _command(Command("hold", None if level == "auto" else int(level)), store, process)


@breaker.command()
def reset(store: Store = None, process: Only = None) -> None:
    """Close all levels of the breakers that run and forget their failures."""
    from kvobs.breaker import Command

    _command(Command("reset"), store, process)


def _command(command: Any, store: Path | None, process: str | None) -> None:
    from kvobs.breaker import send

    reader, processes = _read(store)
    with_breaker = {row["process"] for row in _standing(reader, processes)}
    found = [one for one in _chosen(processes, process) if one.alive and one.process in with_breaker]
    if not found:
        raise Refused(f"No process {'of this store' if process is None else process} runs with a breaker.")
    path = _path(store)
    for one in found:
        try:
            send(path if path.is_dir() else path.parent, one.process, command)
        except (OSError, ValueError) as error:
            raise Refused(f"The command cannot be given to {one.process[:8]}: {error}") from None
        say(f"{one.process[:8]} (pid {one.pid}) takes it within about a second.")


# -- reading ---------------------------------------------------------------------------------------------


def _path(store: Path | None) -> Path:
    from kvobs import config

    found = store or config.load().store
    if found is None:
        raise Refused("The store is off in this configuration; name the store.")
    if not found.exists():
        raise Refused(f"There is no store at {found}.")
    return found


def _read(store: Path | None) -> tuple[StoreReader, list[Process]]:
    from kvobs.store import StoreError, StoreReader

    try:
        reader = StoreReader(_path(store))
        return reader, reader.processes()
    except StoreError as error:
        raise Refused(str(error)) from error


def _chosen(processes: list[Process], wanted: str | None) -> list[Process]:
    if wanted is None:
        return processes
    found = [one for one in processes if one.process.startswith(wanted) or str(one.pid) == wanted]
    if not found:
        raise Refused(f"There is no process {wanted!r} in this store.")
    return found


def _standing(reader: StoreReader, processes: list[Process]) -> list[dict[str, Any]]:
    """The latest word on each scope of each process that has a breaker."""
    from kvobs.store import decisions

    latest: dict[tuple[str, str], dict[str, Any]] = {}
    for point in reader.points("kvobs.breaker.level"):
        scope = point.attributes["scope"]
        latest[point.process, scope] = {
            "process": point.process, "scope": scope, "mode": point.attributes["mode"], "level": int(point.value),
            "wall_ns": point.wall_ns, "last": ""}
    for told in decisions(reader):
        if (told.process, told.record.scope) in latest:
            latest[told.process, told.record.scope]["last"] = f"{_clock(told.wall_ns)} {told.record.reason}"
    alive = {one.process: one.alive for one in processes}
    facts = {(one.process, one.record.subject): (one.record.reason, one.wall_ns) for one in reader.availability()}
    found = []
    for _, row in sorted(latest.items()):
        policy, since = facts.get((row["process"], "breaker policy"), ("", None))
        refused, _ = facts.get((row["process"], "breaker policy file"), ("", None))
        found.append(row | {"alive": alive.get(row["process"], False), "policy": policy, "policy_wall_ns": since,
                            "refused": refused})
    return found


def _document(one: Stored[Any]) -> dict[str, Any]:
    import msgspec

    what = "decision" if type(one.record).__name__ == "Decided" else "action"
    return {"process": one.process, "wall_ns": one.wall_ns, "what": what, **msgspec.structs.asdict(one.record)}


def _sentence(record: model.Decided | model.ActionTaken) -> str:
    from kvobs import model

    if isinstance(record, model.Decided):
        readings = ", ".join(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                             for name, value in record.readings)
        rejected = f" Not done: {'; '.join(record.rejected)}." if record.rejected else ""
        return plain(f"[{record.mode}] {record.scope}: {record.reason} Read: {readings or 'nothing'}.{rejected}")
    what = f"{'undo ' if record.undo else ''}{record.kind} of {record.actuator}, level {record.level}"
    if not record.done:
        return plain(f"{what}: refused. {record.reason}")
    late = " It was late." if record.late else ""
    return plain(f"{what}: done in {record.duration_ns / 1e6:.1f} ms, {record.bytes:,} bytes regained.{late}")


def _clock(wall_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall_ns / SECOND))
