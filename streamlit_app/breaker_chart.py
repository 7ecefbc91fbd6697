"""The levels of breakers over time. Pure: no store, no widget."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt
import pandas as pd

from kvobs.breaker.simulator import WouldHave
from kvobs.model import Decided
from kvobs.store import Stored
from streamlit_app.breaker_data import Span

NAMES = ("0 normal", "1 reorganise", "2 offload", "3 degrade")
COLOURS = ("#BBBBBB", "#56B4E9", "#E69F00", "#D55E00")  # Okabe and Ito's, told apart with any colour vision
ROW, AROUND = 30, 140  # pixels: a scope, and the axis with the legend


def replayed_spans(scope: str, found: WouldHave, begin_ns: int, end_ns: int) -> list[Span]:
    """The levels that a replay's transitions went through."""
    made, level, began, opened = [], 0, begin_ns, set[int]()
    for one in found.transitions:
        (opened.add if one.after.value == "open" else opened.discard)(one.level)
        at = min(max(one.t_ns, begin_ns), end_ns)
        if max(opened, default=0) != level:
            made.append(Span(scope, level, began, at))
            level, began = max(opened, default=0), at
    return [one for one in (*made, Span(scope, level, began, end_ns)) if one.end_ns > one.begin_ns]


def timeline(spans: Sequence[Span], decisions: Iterable[Stored[Decided]], begin_ns: int, end_ns: int) -> Any:
    """A row per scope, coloured by level, with a mark where something was decided. None when there is nothing."""
    if not spans:
        return None
    table = pd.DataFrame([{"scope": one.scope, "level": NAMES[one.level], "begin": _time(one.begin_ns),
                           "end": _time(one.end_ns)} for one in spans])
    begin_ns = max(begin_ns, min(one.begin_ns for one in spans))  # the part before it has nothing to show
    within = alt.Scale(domain=[_time(begin_ns).isoformat(), _time(end_ns).isoformat()], type="utc")
    axis = alt.Axis(format="%H:%M:%S", labelOverlap="greedy", tickCount=6)
    y = alt.Y("scope:N", title=None, sort=list(dict.fromkeys(table["scope"])), axis=alt.Axis(labelLimit=220))
    bars = alt.Chart(table).mark_bar(height=18).encode(
        x=alt.X("begin:T", title="UTC", scale=within, axis=axis), x2="end:T", y=y,
        color=alt.Color("level:N", scale=alt.Scale(domain=list(NAMES), range=list(COLOURS)),
                        legend=alt.Legend(title=None, orient="bottom", columns=4)),
        tooltip=["scope:N", "level:N", alt.Tooltip("begin:T", format="%H:%M:%S"),
                 alt.Tooltip("end:T", format="%H:%M:%S")])
    marks = [{"scope": one.record.scope, "at": _time(one.wall_ns), "reason": one.record.reason} for one in decisions
             if begin_ns <= one.wall_ns <= end_ns]
    drawn = bars
    if marks:
        drawn += alt.Chart(pd.DataFrame(marks)).mark_tick(thickness=2, size=26, color="#888888").encode(
            x=alt.X("at:T", scale=within), y=y, tooltip=[alt.Tooltip("at:T", format="%H:%M:%S"), "reason:N"])
    return drawn.properties(height=ROW * table["scope"].nunique() + AROUND)


def _time(wall_ns: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.UTC)
