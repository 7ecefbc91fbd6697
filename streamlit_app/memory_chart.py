"""The memory map as charts. Pure: a device's state with names, to a chart.

A bar is a segment, drawn over the full width whatever its size; its blocks are in order of address. What would be too
small or too many to be seen is drawn together, and says how many it stands for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from kvobs.allocator.state import ALLOCATED, INACTIVE, Block, Segment
from streamlit_app import units
from streamlit_app.charts import binary
from streamlit_app.memory_data import (
    FREE,
    MORE_CACHES,
    OTHER,
    PENDING_FREE,
    SEVERAL_HOLDERS,
    DeviceMap,
    category,
    holder_text,
)

BARS = 48
PARTS = 160  # of one bar: narrower ones are drawn together
STEP, AROUND, LEGEND = 18, 112, 26  # pixels: of a bar, of title and margins, of a row of the legend
# Okabe and Ito's, less those that the fixed ones take.
CACHE_COLOURS = ("#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#8B5FBF")
FIXED = {"weights": "#0072B2", MORE_CACHES: "#A3D39C", OTHER: "#8A8F98", SEVERAL_HOLDERS: "#5A4632",
         PENDING_FREE: "#F0E442", FREE: "#C9CDD3", "activation": "#A6761D", "gradient": "#7A1F1F",
         "optimizer": "#1F7A6D", "workspace": "#B15928", "communication": "#3F3F7A"}
LAST = (MORE_CACHES, "weights", OTHER, SEVERAL_HOLDERS, PENDING_FREE, FREE)
STATES = {INACTIVE: "free", ALLOCATED: "allocated"}
PINNED = "#E0701A"
Row = dict[str, Any]


def colours(names: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """A colour per name; a cache keeps the one that it had ``before``."""
    found = {name: FIXED[name] for name in names if name in FIXED}
    others = sorted(name for name in names if name not in FIXED)
    found |= {name: before[name] for name in others if name in before}
    for name in others:
        if name not in found:
            free = [colour for colour in CACHE_COLOURS if colour not in found.values()] or list(CACHE_COLOURS)
            found[name] = free[0]
    return dict(sorted(found.items(), key=lambda one: (LAST.index(one[0]) if one[0] in LAST else -1, one[0])))


def shown(device: DeviceMap, most: int = BARS) -> tuple[list[Segment], list[Segment]]:
    """The segments with bars of their own, in order of stream, pool, kind and address, and the rest.

    With more than ``most``, half of the bars go to those that hold most back, the others to the largest.
    """
    ordered = sorted(device.state, key=lambda one: (one.stream, one.pool, one.small, one.address))
    if len(ordered) <= most:
        return ordered, []
    held = {address: pin.held_back_bytes for address, pin in device.pins.items()}
    pinned = sorted(ordered, key=lambda one: (-held.get(one.address, 0), -one.size))
    chosen = {one.address for one in pinned[:most // 2]}
    for one in sorted(ordered, key=lambda one: -one.size):
        if len(chosen) < most:
            chosen.add(one.address)
    return ([one for one in ordered if one.address in chosen], [one for one in ordered if one.address not in chosen])


def label_of(segment: Segment, several: bool) -> str:
    """A segment's name beside its bar."""
    where = f"stream {segment.stream} · " + (f"pool {segment.pool} · " if segment.pool else "") if several else ""
    kind = "small" if segment.small else "large"
    return f"{where}{kind}{' expandable' if segment.expandable else ''} · {segment.address:#x} · " + units.size(
        segment.size)


def rows_of(device: DeviceMap, most: int = BARS) -> list[Row]:
    """The parts of all bars: bar, from and to (shares of its segment), what it is, and the words of the tooltip."""
    single, rest = shown(device, most)
    several = len({(one.stream, one.pool) for one in device.state}) > 1
    rows = [row for segment in single for row in _bar(device, segment, label_of(segment, several))]
    if rest:
        sizes, counts = _by_category(device, rest)
        total, at = sum(segment.size for segment in rest), 0
        label = f"{len(rest):,} more segments · {units.size(total)}"
        for name in sorted(sizes, key=lambda one: (LAST.index(one) if one in LAST else -1, one)):
            rows.append(_row(label, at / total, (at + sizes[name]) / total, name, f"{len(rest):,} segments together",
                             sizes[name], "", f"{counts[name]:,} blocks", name))
            at += sizes[name]
    return rows


def _by_category(device: DeviceMap, segments: Iterable[Segment]) -> tuple[Counter[str], Counter[str]]:
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for segment in segments:
        for block in segment.blocks:
            name = category(block, device.names)
            sizes[name] += block.size
            counts[name] += 1
    return sizes, counts


def _bar(device: DeviceMap, segment: Segment, label: str) -> Iterator[Row]:
    """Neighbours that are alike are one part, and so are runs of those too narrow to be seen."""
    narrow, together = segment.size / PARTS, list[list[Block]]()
    for run in _alike(segment.blocks, device.names):
        small = sum(block.size for block in run) < narrow
        if small and together and sum(block.size for block in together[-1]) < narrow:
            together[-1] += run
        else:
            together.append(list(run))
    for run in together:
        yield _part(device, segment, label, run)


def _alike(blocks: Sequence[Block], names: Sequence[str]) -> Iterator[list[Block]]:
    run: list[Block] = []
    for block in blocks:
        if run and category(run[-1], names) != category(block, names):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def _part(device: DeviceMap, segment: Segment, label: str, run: Sequence[Block]) -> Row:
    first, size = run[0], sum(block.size for block in run)
    begin = (first.address - segment.address) / segment.size
    end = begin + size / segment.size
    sizes: Counter[str] = Counter()
    for block in run:
        sizes[category(block, device.names)] += block.size
    name = sizes.most_common(1)[0][0]
    who = sorted({holder_text(block, device.found.holders) for block in run})
    holder = ", ".join(who[:3]) + (f" and {len(who) - 3} more" if len(who) > 3 else "")
    if len(run) == 1:
        asked = units.raw(first.requested, "B") if first.state != INACTIVE else ""
        state = STATES.get(first.state, "pending free")
    else:
        asked = units.raw(sum(block.requested for block in run if block.state != INACTIVE), "B")
        state = f"{len(run):,} blocks: " + ", ".join(f"{units.size(one)} {word}" for word, one in sizes.most_common(4))
    return _row(label, begin, end, name, f"{first.address:#x}", size, asked, state, holder)


def _row(bar: str, begin: float, end: float, name: str, address: str, size: int, requested: str, state: str,
         holder: str) -> Row:
    return {"segment": bar, "begin": begin, "end": end, "what": name, "address": address,
            "size": f"{units.size(size)} ({size:,} B)", "requested": requested or "-", "state": state,
            "holder": holder}


def segments(device: DeviceMap, colour: Mapping[str, str], most: int = BARS) -> Any:
    """The bars of a device; None when nothing is reserved."""
    rows = rows_of(device, most)
    if not rows:
        return None
    scale = alt.Scale(domain=list(colour), range=list(colour.values()))
    order = list(dict.fromkeys(row["segment"] for row in rows))
    y = alt.Y("segment:N", sort=order, title=None, axis=alt.Axis(
        labelLimit=330, ticks=False, domain=False, labelOverlap=False, labelFontSize=11))
    reach = alt.Scale(domain=[0, 1.17], nice=False)
    drawn = alt.Chart(pd.DataFrame(rows)).mark_bar(height=STEP - 4, stroke="#80808080", strokeWidth=0.4).encode(
        x=alt.X("begin:Q", title=None, axis=None, scale=reach), x2="end:Q", y=y,
        color=alt.Color("what:N", scale=scale, legend=alt.Legend(title=None, orient="top", columns=6, labelLimit=240,
                                                                 symbolType="square")),
        tooltip=["what:N", "state:N", "size:N", "requested:N", "address:N", "holder:N", "segment:N"])
    single, _ = shown(device, most)
    several = len({(one.stream, one.pool) for one in device.state}) > 1
    pinned = [{"segment": label_of(one, several), "at": 1.006, "pinned": f"◆ pins {units.size(pin.held_back_bytes)}",
               "held back": f"{units.size(pin.held_back_bytes)} ({pin.held_back_bytes:,} B)", "blocks": pin.blocks,
               "smallest": f"{pin.block.address:#x}, {units.size(pin.block.size)}, "
                           f"{holder_text(pin.block, device.found.holders)}"}
              for one in single if (pin := device.pins.get(one.address)) is not None]
    if pinned:
        drawn += alt.Chart(pd.DataFrame(pinned)).mark_text(align="left", color=PINNED, fontSize=11).encode(
            x=alt.X("at:Q", scale=reach, axis=None), y=y, text="pinned:N",
            tooltip=["held back:N", alt.Tooltip("blocks:Q", title="by blocks in use"),
                     alt.Tooltip("smallest:N", title="smallest of them")])
    return drawn.properties(height=STEP * len(order) + AROUND + LEGEND * -(-len(colour) // 6),
                            title="Segments, each over the full width, and their blocks")


def overview(device: DeviceMap, colour: Mapping[str, str]) -> Any:
    """The device's reserved bytes by what they are, to scale; None when nothing is reserved."""
    sizes, counts = _by_category(device, device.state)
    if not sizes:
        return None
    unit, scale = binary(float(device.sums.reserved))
    table = pd.DataFrame([{"what": name, "value": size / scale, "size": f"{units.size(size)} ({size:,} B)",
                           "blocks": counts[name], "place": list(colour).index(name),
                           "share": units.share(size / device.sums.reserved)} for name, size in sizes.items()])
    return alt.Chart(table).mark_bar(height=26, stroke="#80808080", strokeWidth=0.4).encode(
        x=alt.X("value:Q", title=f"reserved bytes by holder, to scale ({unit})", axis=alt.Axis(format=".4~g")),
        color=alt.Color("what:N", legend=None, scale=alt.Scale(domain=list(colour), range=list(colour.values()))),
        order="place:Q", tooltip=["what:N", "size:N", "share:N", "blocks:Q"]).properties(height=96)
