"""What the page Breaker says in words and rows. Pure."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence

from kvobs.breaker import Policy
from kvobs.breaker.simulator import UNKNOWN as SIMULATED
from kvobs.breaker.simulator import WouldHave, share_of, untold
from kvobs.model import ActionTaken, Decided
from kvobs.store import Stored
from streamlit_app import breaker_data, data, units
from streamlit_app.breaker_chart import NAMES

LIMITS_S = {1: 0.2, 2: 1.2, 3: 3.0}  # the article's recovery times (S11)
MODES = {"observe": "It decides and tells; nothing is done.", "act": "It decides, and what it orders is done."}
UNKNOWN = "not known yet"
MOST = 500  # rows of a table, the newest


def figures(found: breaker_data.Breaker, reach: str) -> list[data.Figure]:
    """The strip."""
    level = max(found.levels.values(), default=None)
    opened = sum(one.record.after == "open" for one in found.decisions)
    done = [one.record for one in found.actions if one.record.done and not one.record.undo]
    return [
        data.Figure("mode", "Mode", found.mode or UNKNOWN, MODES.get(found.mode, ""), None, "KVOBS_BREAKER."),
        data.Figure("level", "Level now", UNKNOWN if level is None else NAMES[level],
                    f"the highest of {len(found.levels)} scope{'' if len(found.levels) == 1 else 's'}", found.age_s,
                    "A scope is a device, a model's pool or the process."),
        data.Figure("decisions", f"Decisions, {reach}", f"{len(found.decisions):,}", f"{opened:,} opened a level",
                    None, "A level changed its phase: closed, open or half-open."),
        data.Figure("actions", f"Actions done, {reach}", f"{len(done):,}",
                    units.raw(sum(one.bytes for one in done), "B") + " regained", None,
                    "Measured by what carried them out."),
        data.Figure("untold", "Signals not told", f"{len(found.untold)}", ", ".join(found.untold) or "all are told",
                    None, "Conditions on them do not hold: the breaker fails open."),
    ]


def decision_rows(found: breaker_data.Breaker) -> list[dict[str, object]]:
    """A row per decision, the newest first; ``MOST`` of them."""
    rows: list[dict[str, object]] = []
    effects = breaker_data.became(found.decisions, found.actions)
    for one, became in list(zip(found.decisions, effects, strict=True))[:-MOST - 1:-1]:
        told = one.record
        rows.append({
            "when (UTC)": clock(one.wall_ns), "scope": told.scope, "level": NAMES[told.level],
            "change": f"{told.before} → {told.after}", "reason": why(told),
            "effect": "; ".join(map(effect, became)) or _none(told),
            "signals": ", ".join(f"{name} {value:.4g}" if isinstance(value, float | int) else f"{name} {value}"
                                 for name, value in told.readings) or "none",
            "not done instead": "; ".join(told.rejected)})
    return rows


def why(told: Decided) -> str:
    """A decision's reason without what the columns beside it say."""
    said = told.reason.partition(f" is {told.after}: ")[2] or told.reason
    return said[:1].upper() + said[1:]


def _none(told: Decided) -> str:
    if "open" not in (told.before, told.after):
        return "nothing is ordered by this change"
    return "no action answered" if told.mode == "act" else "nothing is done in this mode"


def effect(taken: ActionTaken) -> str:
    """What became of one order."""
    what = f"{'undo ' if taken.undo else ''}{taken.kind} of {taken.actuator}"
    if not taken.done:
        return f"{what}: refused. {taken.reason}"
    return (f"{what}: {units.seconds(taken.duration_ns / 1e9)}{', late' if taken.late else ''}, "
            f"{units.size(taken.bytes)} regained")


def action_rows(taken: Sequence[ActionTaken]) -> list[dict[str, object]]:
    """A row per kind of action that was ordered: how often, with what effect, and how its time stands to its limit."""
    kinds: dict[tuple[int, str, str], list[ActionTaken]] = {}
    for one in taken:
        if not one.undo:
            kinds.setdefault((one.level, one.kind, one.actuator), []).append(one)
    rows: list[dict[str, object]] = []
    for (level, kind, actuator), every in sorted(kinds.items()):
        done = [one for one in every if one.done]
        rows.append({
            "level": NAMES[level], "action": kind, "of": actuator, "ordered": len(every), "done": len(done),
            "refused": len(every) - len(done), "late": sum(one.late for one in done),
            "bytes regained, median": units.size(statistics.median(one.bytes for one in done)) if done else "none done",
            "sum": units.size(sum(one.bytes for one in done)) if done else "none done",
            "time, median": units.seconds(statistics.median(one.duration_ns for one in done) / 1e9) if done
            else "none done", "limit": units.seconds(LIMITS_S[level])})
    return rows


def objective_rows(standings: Sequence[breaker_data.Standing]) -> list[dict[str, object]]:
    """A row per objective; what nothing told is not known yet, never 0."""
    def share(value: float | None) -> str:
        return UNKNOWN if value is None else units.share(value)

    return [{"objective": one.name, "target": share(one.target),
             "good / all": UNKNOWN if one.events is None else f"{one.good or 0:,.0f} / {one.events:,.0f}",
             "budget left": share(one.budget),
             **{f"burn {window}": f"{one.burn[window]:.2f}" if window in one.burn else UNKNOWN
                for window in ("5m", "1h", "30m", "6h")},
             "alerts": ", ".join(one.alerts) or "none"} for one in standings]


def hindsight(found: WouldHave, mode: str) -> list[str]:
    """Precision and recall of what was decided, in sentences."""
    horizon = f"{breaker_data.HORIZON_S:.0f} s"
    sentences = [
        f"Trouble followed within {horizon} of {share_of(found.followed, found.opened)} openings of a level."
        if found.opened else "No level opened, so how often trouble follows is not known.",
        f"Of the troubles, {share_of(found.foreseen, len(found.troubles))} began while a level was open, or at most "
        f"{horizon} after one was." if found.troubles else
        "No trouble was recorded, so how much of it is foreseen is not known.",
        "Trouble is an out-of-memory error, a miss of an objective, or more than ten preemptions in ten seconds; of "
        "the last six hours of the process."]
    if mode == "act":
        sentences.append("Trouble that the breaker prevented has not come, and counts against it here.")
    return sentences


def replay(found: WouldHave, policy: Policy, decisions: Sequence[Stored[Decided]]) -> str:
    """What a replay is worth, in sentences."""
    missing = untold(policy, found.signals)
    blind = (f" Nothing recorded tells {', '.join(missing)}: conditions on these never hold in the replay."
             if missing else "")
    return (f"Modelled: {found.policy} would have made {len(found.transitions):,} transitions over {found.instants:,} "
            f"instants of at most six hours; in the range above {len(decisions):,} were made.{blind} {SIMULATED}")


def clock(wall_ns: int) -> str:
    """A time of the day."""
    return datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.UTC).strftime("%H:%M:%S")
