"""Charts from records. Pure: no store, no widget.

Colours are Okabe and Ito's, which people with any colour vision tell apart, on light and dark ground; where lines
share a chart they also differ by dash.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from kvobs.analysis import corrected
from kvobs.model import Turn
from kvobs.store import AttentionSecond, Stored

PALETTE = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#0072B2")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [4, 1], [1, 3])
HEIGHT = 300
Samples = Sequence[tuple[int, float]]


def frame(lines: Mapping[str, Samples]) -> Any:
    """Named lines in long form: ``time`` (UTC), ``line``, ``value``, ``run``, ``alone``; sorted by name.

    A line is drawn through the samples of one run only: where it had no value for a while it is absent, and a
    stroke across that time would say that it had one. ``alone`` marks runs of one sample, which no stroke shows.
    """
    rows: list[tuple[Any, ...]] = []
    for name, samples in sorted(lines.items()):
        numbers = runs([wall_ns for wall_ns, _ in samples])
        sizes = collections.Counter(numbers)
        rows += [(datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.UTC), name, value, number,
                  sizes[number] == 1) for (wall_ns, value), number in zip(samples, numbers, strict=True)]
    return pd.DataFrame(rows, columns=["time", "line", "value", "run", "alone"])


def runs(times: Sequence[int]) -> list[int]:
    """The number of the run that each instant belongs to; one ends at a gap of more than 2.5 usual distances."""
    distances = [later - earlier for earlier, later in itertools.pairwise(times)]
    if not distances:
        return [0] * len(times)
    usual = statistics.median(distances)
    return list(itertools.accumulate((int(distance > 2.5 * usual) for distance in distances), initial=0))


def in_bytes(named: Mapping[str, Samples], per: str = "") -> tuple[str, dict[str, Samples]]:
    """Bytes in the binary unit that suits the largest of them, and that unit's name."""
    unit, scale = binary(max((abs(value) for samples in named.values() for _, value in samples), default=0.0))
    return unit + per, {name: [(wall_ns, value / scale) for wall_ns, value in samples]
                        for name, samples in named.items()}


def binary(most: float) -> tuple[str, int]:
    """The binary unit that suits a number of bytes, and its bytes."""
    step = next((power for power in (3, 2, 1) if most >= 1024**power), 0)
    return ("B", "KiB", "MiB", "GiB")[step], 1024**step


def _scales(names: Sequence[str]) -> tuple[alt.Scale, alt.Scale]:
    colours = [PALETTE[index % len(PALETTE)] for index in range(len(names))]
    # After the last colour they begin again with other dashes, so that no two of 36 lines look alike.
    dashes = [DASHES[(index + index // len(PALETTE)) % len(DASHES)] for index in range(len(names))]
    return alt.Scale(domain=list(names), range=colours), alt.Scale(domain=list(names), range=dashes)


def _legend(*, filled: bool = False) -> Any:
    return alt.Legend(title=None, orient="bottom", columns=3, labelLimit=220, symbolStrokeWidth=4,
                      symbolType="square" if filled else "stroke")


def _time() -> Any:
    return alt.X("time:T", title=None, axis=alt.Axis(format="%H:%M:%S", labelOverlap="greedy", tickCount=6))


def lines(title: str, unit: str, named: Mapping[str, Samples], *, stacked: bool = False) -> Any:
    """Lines (or stacked areas) over time; a line of one sample is a point. None when there is nothing."""
    table = frame({name: samples for name, samples in named.items() if samples})
    if table.empty:
        return None
    names = list(dict.fromkeys(table["line"]))
    colour, dash = _scales(names)
    legend = _legend(filled=stacked) if len(names) > 1 else None
    base = alt.Chart(table).encode(
        x=_time(), color=alt.Color("line:N", scale=colour, legend=legend),
        tooltip=[alt.Tooltip("time:T", format="%H:%M:%S"), "line:N",
                 alt.Tooltip("value:Q", format=",.6~g", title=unit)])
    y = alt.Y("value:Q", title=unit, stack="zero" if stacked else None, scale=alt.Scale(zero=True),
              axis=alt.Axis(format=".4~g"))
    if stacked:
        drawn = base.mark_area(opacity=0.75, line=True).encode(y=y, detail="run:N")
    else:
        drawn = base.mark_line().encode(
            y=y, detail="run:N", strokeDash=alt.StrokeDash("line:N", scale=dash, legend=legend))
    if table["alone"].any():
        drawn += base.transform_filter("datum.alone").mark_point(filled=True, size=40, opacity=1).encode(y=y)
    return drawn.properties(title=title, height=HEIGHT)


def band(title: str, unit: str, mean: Samples, deviation: Samples) -> Any:
    """A mean with one standard deviation to each side; the deviation may lack at some instants."""
    spread = dict(deviation)
    table = frame({"mean": mean})
    if table.empty:
        return None
    widths = [spread.get(wall_ns) for wall_ns, _ in mean]
    table["low"] = [max(value - width, 0.0) if width is not None else None
                    for value, width in zip(table["value"], widths, strict=True)]
    table["high"] = [value + width if width is not None else None
                     for value, width in zip(table["value"], widths, strict=True)]
    x = _time()
    base = alt.Chart(table).encode(
        x=x, tooltip=[alt.Tooltip("time:T", format="%H:%M:%S"), alt.Tooltip("value:Q", format=".4~g", title=unit)])
    y = alt.Y("value:Q", title=unit)
    drawn = base.mark_line(color=PALETTE[0]).encode(y=y, detail="run:N")
    if table["low"].notna().any():
        drawn = base.mark_area(opacity=0.3, color=PALETTE[0]).encode(
            y=alt.Y("low:Q", title=unit), y2="high:Q", detail="run:N") + drawn
    if table["alone"].any():
        drawn += base.transform_filter("datum.alone").mark_point(color=PALETTE[0], filled=True, size=40).encode(y=y)
    return drawn.properties(title=title, height=HEIGHT)


def shares_pool(turn: Turn) -> bool:
    """Whether a turn was in an engine whose requests share one pool, so that none of them has buffers of its own."""
    return turn.origin.source in ("vllm", "sglang")


def turns(found: Sequence[Turn]) -> Any:
    """KV held at the end of each turn as bars; of turns with their own buffers also slack and re-allocations.

    The latter are points with their own axis.
    """
    own = [turn for turn in found if not shares_pool(turn)]
    unit, sizes = in_bytes({"held": [(turn.turn, turn.kv_bytes) for turn in found],
                            "slack": [(turn.turn, turn.kv_reserved_bytes - turn.kv_bytes) for turn in own]})
    parts = pd.DataFrame([(number, name, value) for name, samples in sizes.items() for number, value in samples],
                         columns=["turn", "part", "size"])
    counts = pd.DataFrame([(turn.turn, turn.reallocations) for turn in own], columns=["turn", "re-allocations"])
    turn_axis = alt.X("turn:O", title="turn", axis=alt.Axis(labelAngle=0, labelOverlap="greedy"))
    colour = {"held": PALETTE[0], **({"slack": PALETTE[4]} if own else {})}
    bars = alt.Chart(parts).mark_bar(opacity=0.85, size=min(40, max(600 // len(found), 1))).encode(
        x=turn_axis, y=alt.Y("size:Q", title=f"KV ({unit})"),
        order=alt.Order("part:N", sort="ascending"),
        color=alt.Color("part:N", scale=alt.Scale(domain=list(colour), range=list(colour.values())),
                        legend=alt.Legend(title=None, orient="bottom")),
        tooltip=["turn:O", "part:N", alt.Tooltip("size:Q", title=unit, format=",.6~g")])
    if not own:
        return bars.properties(title="KV bytes held at the end of each turn", height=320)
    points = alt.Chart(counts).mark_line(color=PALETTE[1], point=alt.OverlayMarkDef(
        color=PALETTE[1], shape="diamond", size=70), strokeDash=[4, 3]).encode(
        x=turn_axis, y=alt.Y("re-allocations:Q", title="re-allocations (dashed)",
                             axis=alt.Axis(format="d", tickMinStep=1)),
        tooltip=["turn:O", "re-allocations:Q"])
    return alt.layer(bars, points).resolve_scale(y="independent").properties(
        title="KV bytes at the end of each turn, and its re-allocations", height=320)


def attention_frame(rows: Iterable[tuple[Stored[AttentionSecond], int | None]]) -> Any:
    """One line per second and kind with the shares and sizes that the charts draw."""
    found: list[dict[str, Any]] = []
    for stored, held in rows:
        row = stored.record
        queries, entries = row.queries or None, row.entries or None
        local = row.local_sum / queries if queries else None
        chance = row.chance_sum / queries if queries else None
        found.append({
            "time": datetime.datetime.fromtimestamp(stored.wall_ns / 1e9, datetime.UTC), "tokens": row.tokens,
            "within 64 tokens": local, "chance line": chance,
            "corrected for chance": None if local is None or chance is None else corrected(local, chance),
            "alive (cosine > 0.15)": row.alive / entries if entries else None,
            "active": row.blocks - row.pending, "pending evict": row.pending, "to pending": row.to_pending,
            "to active": row.to_active, "reclaimable": row.reclaimable_bytes,
            "held by the cache": held})
    return pd.DataFrame(found)


def over_bytes(table: Any, title: str, columns: Sequence[str], x: str) -> Any:
    """As ``over`` for columns of bytes, in the binary unit that suits the largest of them."""
    sizes = table[list(columns)].astype(float)
    unit, scale = binary(float(sizes.max().max()))
    return over(table.assign(**{name: sizes[name] / scale for name in columns}), title, unit, columns, x)


def over(table: Any, title: str, unit: str, columns: Sequence[str], x: str, *, share: bool = False,
         stacked: bool = False) -> Any:
    """Columns of ``attention_frame`` over ``tokens`` or ``time``; None when none of them has a value."""
    long = table.melt(id_vars=[x], value_vars=list(columns), var_name="line", value_name="value").dropna()
    if long.empty:
        return None
    colour, dash = _scales(columns)
    axis = (alt.X("tokens:Q", title="tokens in view", scale=alt.Scale(zero=False), axis=alt.Axis(format=",.10~g"))
            if x == "tokens" else _time())
    y = alt.Y("value:Q", title=unit, stack="zero" if stacked else None, axis=alt.Axis(format=".4~g"),
              scale=alt.Scale(domain=[min(0.0, float(long["value"].min())), 1.0]) if share else alt.Scale(zero=True))
    legend = _legend(filled=stacked) if len(columns) > 1 else None
    base = alt.Chart(long).encode(
        x=axis, color=alt.Color("line:N", scale=colour, legend=legend),
        tooltip=[f"{x}:{'Q' if x == 'tokens' else 'T'}", "line:N", alt.Tooltip("value:Q", format=".4~g")])
    if not stacked:
        drawn = base.mark_line(point=alt.OverlayMarkDef(size=18)).encode(
            y=y, strokeDash=alt.StrokeDash("line:N", scale=dash, legend=legend))
    elif long[x].nunique() > 1:
        drawn = base.mark_area(opacity=0.75).encode(y=y)
    else:
        drawn = base.mark_bar(opacity=0.85, size=12).encode(y=y)
    return drawn.properties(title=title, height=HEIGHT)
