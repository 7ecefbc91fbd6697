"""Who holds a pool, and what became of requests over time, as charts. Pure.

Colours are Okabe and Ito's. Where a phase waits its bar is thin, where it computes thick, so that colour is not all
that tells them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import altair as alt
import pandas as pd

from kvobs.model import Blocks, PoolWork, RequestRow
from streamlit_app import units
from streamlit_app.memory_chart import AROUND, CACHE_COLOURS, FIXED, LEGEND
from streamlit_app.memory_data import MORE_CACHES
from streamlit_app.requests_timeline import Phase, Timeline
from streamlit_app.requests_words import CAUSES, PHASES, clock, holders, names, reason_of, wanted

BARS = ("pool", "by session", "by request")
SESSIONS = 6  # with a colour of their own
STATES = {"used": FIXED["weights"], "unlisted": "#5F6B7A", "pinned": "#A67C52", "cached": "#E8D9A8",
          "free": FIXED["free"], "unexplained": "#7A1F1F"}
WORDS = {"used": "in use", "unlisted": "in use, not listed", "cached": "cached, held by nobody"}
MORE, NOBODY, UNLISTED = "more sessions", "no session", "unlisted"
PHASE_COLOURS = {"queued": "#8A8F98", "prefill": "#0072B2", "decode": "#56B4E9", "preempted": "#D55E00"}
WAITS = ("queued", "preempted")
MS = 1_000_000  # of nanoseconds
BAR, COLUMNS = 36, 2  # pixels of a bar of the pool, columns of its legend
SEEN = 800  # a phase of a smaller part of the time than one of so many is no pixel wide, and not in the legend
STEP, AXIS = 15, 100  # pixels of a row of the timeline, and of its axis with what surrounds it


class Part(NamedTuple):
    """A part of a bar: ``width`` blocks wide, of something that holds ``blocks``."""

    bar: str
    what: str
    name: str
    blocks: int
    width: float


def states_of(pool: Blocks, work: PoolWork | None) -> list[tuple[str, int]]:
    """The states of a pool's blocks, which add up to its size."""
    pinned, unexplained = (work.pinned, work.unexplained) if work is not None else (0, 0)
    return [(name, number) for name, number in (("used", pool.used), ("pinned", pinned), ("cached", pool.cached),
                                                ("free", pool.free), ("unexplained", unexplained)) if number > 0]


def sessions_of(rows: Iterable[RequestRow], before: Sequence[str] = ()) -> list[str]:
    """The sessions with a colour of their own, by its place: at most ``SESSIONS`` of those that hold blocks.

    A session's place comes from its name, not from what it holds, and the one that it had ``before`` is its own until
    one that holds blocks needs it; those that hold most get what is left.
    """
    held: Counter[str] = Counter()
    for row in rows:
        held[row.session] += row.blocks
    holding = [name for name, number in held.most_common() if name and number]
    chosen = [*(name for name in before if name in holding), *(name for name in holding if name not in before)]
    places = [*before, *[""] * (SESSIONS - len(before))]
    for name in sorted(set(chosen[:SESSIONS]) - set(places)):
        first = crc32(name.encode())
        wished = [(first + step) % SESSIONS for step in range(SESSIONS)]
        place = next((one for one in wished if not places[one]), None)
        places[next(one for one in wished if places[one] not in chosen) if place is None else place] = name
    return places


def parts(pool: Blocks, work: PoolWork | None, rows: Sequence[RequestRow], sessions: Sequence[str]) -> list[Part]:
    """The bars: each adds up to the pool.

    What requests hold together can be more than the blocks in use, since they share those of a common prefix: then
    each has its share of the width. It can be less, where not all requests are listed: the rest is ``UNLISTED``.
    """
    states = states_of(pool, work)
    found = [Part(BARS[0], name, name, number, number) for name, number in states]
    holding = [row for row in rows if row.blocks]
    total = sum(row.blocks for row in holding)
    if not total:
        return found
    scale = min(1.0, pool.used / total)
    legend = {name: legend_of(name, sessions) for name in {row.session for row in holding}}
    order = [*(one for one in sessions if one), ""]
    ordered = sorted(holding, key=lambda row: (order.index(row.session) if row.session in order else len(order),
                                               row.session, -row.blocks))
    held: Counter[str] = Counter()
    for row in ordered:
        held[row.session] += row.blocks
    for session, blocks in held.items():
        found.append(Part(BARS[1], legend[session], session or NOBODY, blocks, blocks * scale))
    found += [Part(BARS[2], legend[row.session], row.request, row.blocks, row.blocks * scale) for row in ordered]
    rest = ([(UNLISTED, pool.used - total)] if total < pool.used else []) + [one for one in states if one[0] != "used"]
    return found + [Part(bar, name, name, number, number) for bar in BARS[1:] for name, number in rest]


def legend_of(session: str, sessions: Sequence[str]) -> str:
    """What the legend calls a session; two that look alike differ by their place."""
    if not session:
        return NOBODY
    if session not in sessions:
        return MORE
    place = sessions.index(session)
    shown = " ".join(session.split())[:20]
    alike = [one for one in sessions[:place] if one and " ".join(one.split())[:20] == shown]
    return f"session {shown}" + (f" ({len(alike) + 1})" if alike else "")


def colours(found: Iterable[Part], sessions: Sequence[str]) -> dict[str, str]:
    """A colour for each thing in the bars, in the order of the legend."""
    used = {part.what for part in found}
    own = {legend_of(name, sessions): CACHE_COLOURS[place] for place, name in enumerate(sessions) if name}
    every = {"used": STATES["used"], **own, MORE: FIXED[MORE_CACHES], NOBODY: FIXED["other"], **STATES}
    return {name: colour for name, colour in every.items() if name in used}


def pool_bars(found: Sequence[Part], sessions: Sequence[str], block_bytes: int) -> Any:
    """The bars; None when the pool has no block."""
    if not found:
        return None
    colour = {WORDS.get(name, name): shade for name, shade in colours(found, sessions).items()}
    size = sum(part.blocks for part in found if part.bar == BARS[0])
    table = pd.DataFrame([{
        "bar": part.bar, "what": WORDS.get(part.what, part.what), "width": part.width, "place": place,
        "who": "-" if part.name == part.what else part.name,
        "holds": f"{part.blocks:,} of {size:,} blocks", "share": units.share(part.blocks / size),
        "memory": units.size(part.blocks * block_bytes) if block_bytes else "not told",
    } for place, part in enumerate(found)])
    bars = [name for name in BARS if (table["bar"] == name).any()]
    return alt.Chart(table).mark_bar(height=BAR - 10, stroke="#FFFFFF", strokeWidth=0.8).encode(
        x=alt.X("width:Q", title=f"blocks (of {size:,})", stack="zero", axis=alt.Axis(format=",.4~g", tickCount=6),
                scale=alt.Scale(domain=[0, size], nice=False)),
        y=alt.Y("bar:N", sort=bars, title=None, axis=alt.Axis(ticks=False, domain=False, labelLimit=90)),
        order="place:Q",
        color=alt.Color("what:N", scale=alt.Scale(domain=list(colour), range=list(colour.values())),
                        legend=alt.Legend(title=None, orient="top", columns=COLUMNS, labelLimit=150,
                                          symbolType="square", symbolStrokeWidth=0)),
        tooltip=["what:N", "who:N", "holds:N", "share:N", "memory:N"],
    ).properties(height=BAR * len(bars) + AROUND + LEGEND * -(-len(colour) // COLUMNS))


def gantt(found: Timeline, slots: int) -> Any:
    """Phases of requests over time, the newest request on top, with preemptions; None when there is none."""
    if not found.phases:
        return None
    label = names(found.requests)
    rows = pd.DataFrame([_phase_row(one, found, label, slots) for one in found.phases])
    used = [name for name in PHASE_COLOURS if (rows["key"] == name).any()]
    others = sorted(set(rows["key"]) - set(used))
    domain = [PHASES[name] for name in used] + others
    scale = alt.Scale(domain=domain, range=[PHASE_COLOURS[name] for name in used] + ["#CC79A7"] * len(others))
    x = alt.X("begin:T", title="UTC", axis=alt.Axis(format="%H:%M:%S", labelOverlap="greedy", tickCount=6),
              scale=alt.Scale(type="utc", nice=False))
    y = alt.Y("request:N", sort=list(label.values()), title=None, axis=alt.Axis(
        labelLimit=130, ticks=False, labelOverlap=False, labelFlush=False, labelFontSize=10))
    first = max(found.begin_ns, min(one.begin_ns for one in found.phases))
    least = (found.end_ns - first) / SEEN / MS
    seen = rows[rows["end"] - rows["begin"] >= least]["phase"]
    shown = [name for name in domain if (seen == name).any()]
    drawn = alt.Chart(rows).mark_bar().encode(
        x=x, x2="end:T", y=y,
        color=alt.Color("phase:N", scale=scale, legend=alt.Legend(
            title=None, orient="top", columns=2, labelLimit=260, symbolType="square", values=shown)),
        size=alt.condition("datum.waits", alt.value(4), alt.value(10)),
        opacity=alt.condition("datum.open", alt.value(0.6), alt.value(1)),
        tooltip=["phase:N", "name:N", "session:N", "from:N", "to:N", "took:N", "held:N", "ended:N"])
    ends = pd.DataFrame([{"begin": when // MS, "request": next(iter(label.values()))}
                         for when in (first, found.end_ns)])  # of the axis: it goes on to now
    drawn += alt.Chart(ends).mark_point(opacity=0).encode(x="begin:T", y=y)
    if found.marks:
        marks = pd.DataFrame([{
            "begin": one.wall_ns // MS, "request": label[one.record.request], "victim": one.record.request,
            "at": clock(one.wall_ns), "cause": CAUSES.get(one.record.cause, one.record.cause),
            "wanted by": wanted(one.record), "tokens lost": one.record.tokens_lost,
            "blocks given back": one.record.blocks, "held then": holders(one.record)} for one in found.marks])
        drawn += alt.Chart(marks).mark_point(
            shape="diamond", filled=True, size=70, color="#F0E442", stroke="#202020", strokeWidth=1, opacity=1).encode(
            x="begin:T", y=y, tooltip=["victim:N", "at:N", "cause:N", "wanted by:N", "tokens lost:Q",
                                       "blocks given back:Q", "held then:N"])
    return drawn.properties(height=STEP * len(label) + AXIS + LEGEND * -(-len(shown) // 2))


def _phase_row(one: Phase, found: Timeline, label: Mapping[str, str], slots: int) -> dict[str, Any]:
    ended = f"open: {reason_of(one.reason, slots)}" if one.open and one.phase in WAITS else "open" if one.open else (
        one.outcome or "went on")
    return {"key": one.phase, "phase": PHASES.get(one.phase, one.phase), "request": label[one.request],
            "name": one.request, "session": one.session or "-",
            "begin": max(one.begin_ns, found.begin_ns) // MS, "end": one.end_ns // MS,
            "waits": one.phase in WAITS, "open": one.open, "from": clock(one.begin_ns),
            "to": f"{clock(one.end_ns)}{' or later' if one.open else ''}",
            "took": units.seconds((one.end_ns - one.begin_ns) / 1e9), "held": f"{one.blocks:,} blocks", "ended": ended}
