"""``kvobs breaker simulate``: policies compared on a modelled server, or replayed on a recorded incident."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvobs.cli._errors import Refused
from kvobs.cli._output import bar, print_table, say

if TYPE_CHECKING:
    from kvobs.breaker import Policy, Transition
    from kvobs.breaker.simulator import Figures, Run, Server, Trace, WouldHave

MOST_POLICIES = 8
SHOWN = 12  # transitions per policy, to people
MOST_LISTED = 10_000  # in the JSON document
SECOND = 10**9


def simulate(store: Annotated[Path | None, typer.Option(
                 help="Replay what a store recorded (no server is modelled).", show_default=False)] = None,
             scenario: Annotated[str | None, typer.Option(
                 help="A load shape: steady, rising, burst or idle.", show_default=False)] = None,
             trace: Annotated[Path | None, typer.Option(
                 help="A serving trace: Azure's CSV or Mooncake's JSONL.", show_default=False)] = None,
             policy: Annotated[list[str] | None, typer.Option(
                 help="A policy file or a preset; may be repeated.", show_default="default")] = None,
             rate: Annotated[float, typer.Option(help="Requests arrive so many times as fast.", min=1e-3,
                                                 max=1e6)] = 1.0,
             limit: Annotated[int | None, typer.Option(help="Only the first so many requests.", min=1,
                                                       show_default="all")] = None,
             constants: Annotated[list[str] | None, typer.Option(
                 "--set", metavar="NAME=VALUE",
                 help="A constant of the modelled server, such as blocks=2000; may be repeated.")] = None,
             seed: Annotated[int, typer.Option(help="Of the load shape, of priorities and of retries.", min=0)] = 0,
             horizon: Annotated[str, typer.Option(
                 help="With --store: trouble so soon after a level opened was foreseen.")] = "60s",
             as_json: Annotated[bool, typer.Option("--json", help="As a JSON document.")] = False) -> None:
    """Compare policies of the breaker without an engine: kvobs breaker simulate --scenario rising --policy default.

    With --scenario or --trace the load passes through a modelled server, once without a breaker and once under each
    policy. With --store the signals that a process recorded pass through each policy, beside the trouble that came.
    """
    named = [name for name, value in (("--store", store), ("--scenario", scenario), ("--trace", trace))
             if value is not None]
    if len(named) != 1:
        raise Refused("Name one of --store, --scenario and --trace"
                      + (f", not {' and '.join(named)}." if named else "."))
    policies = _policies(policy or ["default"])
    if store is not None:
        found = _replayed(store, policies, horizon)
        (_print_replayed_json if as_json else _show_replayed)(store, policies, found)
        return
    server = _server(constants or [])
    load = _load(scenario, trace, rate, limit, seed)
    runs = _runs(load, server, policies, seed)
    (_print_json if as_json else _show)(load, server, policies, runs)


# -- what was asked for ----------------------------------------------------------------------------------


def _policies(names: Sequence[str]) -> list[Policy]:
    from kvobs.breaker import PolicyError, load_policy

    if len(names) > MOST_POLICIES:
        raise Refused(f"There are {len(names)} policies; allowed are {MOST_POLICIES}.")
    try:
        return [load_policy(name) for name in names]
    except PolicyError as error:
        raise Refused(str(error)) from None


def _server(changes: Sequence[str]) -> Server:
    from kvobs.breaker.simulator import server_with

    try:
        return server_with(changes)
    except ValueError as error:
        raise Refused(str(error)) from None


def _load(shape: str | None, file: Path | None, rate: float, limit: int | None, seed: int) -> Trace:
    from kvobs.breaker.simulator import read_trace, scenario

    try:
        found = (read_trace(file, rate=rate, limit=limit) if file is not None
                 else scenario(shape or "", seed=seed, rate=rate, limit=limit))
    except ValueError as error:
        raise Refused(str(error)) from None
    if not found.requests:
        raise Refused(f"The {found.name} has no requests.")
    return found


def _runs(load: Trace, server: Server, policies: Sequence[Policy], seed: int) -> list[Run]:
    from kvobs.breaker.simulator import simulate as run

    made = []
    for policy in (None, *policies):
        with bar(f"Simulating {policy.name if policy else 'no breaker'}") as tell:
            made.append(run(load, server, policy, seed=seed, progress=tell))
    return made


# -- a modelled server -----------------------------------------------------------------------------------


def _show(load: Trace, server: Server, policies: Sequence[Policy], runs: Sequence[Run]) -> None:
    from kvobs.breaker.simulator import NOTES, compared, figures, transition_line

    every = [figures(run, server) for run in runs]
    say(f"{load.name}: {len(load.requests):,} requests in {load.requests[-1].arrival_ns / SECOND:,.0f} s. Modelled.")
    print_table(("modelled", *(one.policy for one in every)), compared(every))
    for run in runs[1:]:
        _say_transitions(run.policy, [transition_line(told) for told in run.transitions])
    print()
    for sentence in (*NOTES, *_warnings(policies)):
        say(f"- {sentence}")
    say(f"- The server: {_constants(server)}.")


def _say_transitions(policy: str, lines: Sequence[str]) -> None:
    print()
    say(f"Transitions of {policy}:" if lines else f"{policy} made no transition.")
    for line in lines[:SHOWN]:
        say("  " + line)
    if len(lines) > SHOWN:
        say(f"  and {len(lines) - SHOWN:,} more; --json lists them")


def _warnings(policies: Sequence[Policy], told: Sequence[str] | None = None) -> list[str]:
    from kvobs.breaker.simulator import untold

    sentences = []
    for policy in policies:
        missing = untold(policy) if told is None else untold(policy, told)
        if missing:
            sentences.append(f"{policy.name} also asks for {', '.join(missing)}, which nothing tells here: conditions "
                             "on these never hold.")
        if policy.caveat:
            sentences.append(f"{policy.name}: {policy.caveat}")
    return sentences


def _constants(server: Server) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in msgspec.structs.asdict(server).items())


def _print_json(load: Trace, server: Server, policies: Sequence[Policy], runs: Sequence[Run]) -> None:
    from kvobs.breaker.simulator import CONSTANTS, NOTES, figures

    values = msgspec.structs.asdict(server)
    print(json.dumps({
        "load": load.name, "requests": len(load.requests), "modelled": True, "notes": [*NOTES, *_warnings(policies)],
        "server": [msgspec.structs.asdict(one) | {"value": values[one.name]} for one in CONSTANTS],
        "runs": [_document(run, figures(run, server)) for run in runs]}, indent=2))


def _document(run: Run, found: Figures) -> dict[str, Any]:
    return msgspec.structs.asdict(found) | {"listed": _listed(run.transitions)}


def _listed(transitions: Sequence[Transition]) -> list[dict[str, Any]]:
    return [{"t_ns": told.t_ns, "level": told.level, "before": told.before.value, "after": told.after.value,
             "reason": told.reason, "readings": dict(told.readings), "rejected": list(told.rejected)}
            for told in transitions[:MOST_LISTED]]


# -- a store ---------------------------------------------------------------------------------------------


def _replayed(path: Path, policies: Sequence[Policy], horizon: str) -> list[WouldHave]:
    from kvobs.breaker.simulator import WANTED, replayed
    from kvobs.config import parse_duration
    from kvobs.store import Point, StoreError, StoreReader

    try:
        seconds = parse_duration(horizon) / SECOND
    except ValueError:
        raise Refused(f"--horizon is {horizon!r}; allowed is a duration such as 60s.") from None
    if not path.exists():
        raise Refused(f"There is no store at {path}.")
    samples: dict[str, dict[str, list[Point]]] = {}
    try:
        reader = StoreReader(path)
        reader.refuse_problems()
        for metric in WANTED:
            for point in reader.points(metric):
                samples.setdefault(point.process, {}).setdefault(metric, []).append(point)
    except StoreError as error:
        raise Refused(str(error)) from None
    if not samples:
        raise Refused(f"The store {path} recorded none of the metrics that signals come from.")
    return [made for process in sorted(samples)
            for made in replayed(process, samples[process], policies, seconds)]


def _show_replayed(path: Path, policies: Sequence[Policy], found: Sequence[WouldHave]) -> None:
    from kvobs.breaker.simulator import UNKNOWN, transition_line

    say(f"Policies on what {path} recorded; nothing was done then.")
    print_table(("process", "policy", "instants", "would have opened", "trouble followed (precision)", "troubles",
                 "foreseen (recall)"),
                [(one.process, one.policy, f"{one.instants:,}", f"{one.opened:,}", _share(one.followed, one.precision),
                  f"{len(one.troubles):,}", _share(one.foreseen, one.recall)) for one in found])
    for process, one in {one.process: one for one in found}.items():
        print()
        say(f"Troubles of {process}:" if one.troubles else f"{process} had no trouble.")
        for trouble in one.troubles[:SHOWN]:
            lasted = (trouble.last_ns - trouble.first_ns) / SECOND
            say(f"  {_when(trouble.first_ns)}  {trouble.kind}" + (f", for {lasted:,.0f} s" if lasted else ""))
        if len(one.troubles) > SHOWN:
            say(f"  and {len(one.troubles) - SHOWN:,} more; --json lists them")
    for one in found:
        _say_transitions(f"{one.policy} in {one.process}",
                         [transition_line(told, _when(told.t_ns)) for told in one.transitions])
    print()
    for sentence in (UNKNOWN, *_told_warnings(policies, found)):
        say(f"- {sentence}")


def _told_warnings(policies: Sequence[Policy], found: Sequence[WouldHave]) -> list[str]:
    return _warnings(policies, tuple({name for one in found for name in one.signals}))


def _share(number: int, share: float | None) -> str:
    return f"{number:,}" + ("" if share is None else f" ({share:.0%})")


def _when(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / SECOND, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _print_replayed_json(path: Path, policies: Sequence[Policy], found: Sequence[WouldHave]) -> None:
    from kvobs.breaker.simulator import MAPPING, UNKNOWN

    print(json.dumps({
        "store": str(path), "notes": [UNKNOWN, *_told_warnings(policies, found)],
        "mapping": [{"signal": one.signal, "metrics": list(one.metrics), "formula": one.formula} for one in MAPPING],
        "replays": [{"process": one.process, "policy": one.policy, "instants": one.instants,
                     "signals": list(one.signals), "opened": one.opened, "followed": one.followed,
                     "precision": one.precision, "foreseen": one.foreseen, "recall": one.recall,
                     "troubles": [msgspec.structs.asdict(trouble) for trouble in one.troubles[:MOST_LISTED]],
                     "transitions": len(one.transitions), "listed": _listed(one.transitions)} for one in found]},
        indent=2))
