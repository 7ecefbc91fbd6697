"""Live: what the process's caches and memory do now."""

from __future__ import annotations

import datetime
import functools
import json
import math
from typing import Any

import streamlit as st

from kvobs.model import FlightRecord
from kvobs.store import Series, Stored
from streamlit_app import charts, data, units
from streamlit_app.views import _common

RANGES: dict[str, float | None] = {"1 min": 60, "5 min": 300, "15 min": 900, "1 h": 3600, "all": None}


def render(store: str) -> None:
    """The page: pickers, then what refreshes itself every second."""
    st.header("Live")
    _common.watch(functools.partial(data.processes_seen, store))
    _page(store)


@_common.guarded
def _page(store: str) -> None:
    chosen = _common.pick_process(store)
    reach = st.sidebar.radio("Range", list(RANGES), index=1, key="live-range", horizontal=True)
    _fresh(store, chosen, RANGES[reach])


@st.fragment(run_every=1.0)
def _fresh(store: str, chosen: str | None, range_s: float | None) -> None:
    _draw(store, chosen, range_s)


@_common.guarded
def _draw(store: str, chosen: str | None, range_s: float | None) -> None:
    found = data.live(store, chosen, range_s)
    for problem in found.problems:
        st.warning(units.plain(problem))
    _common.staleness(found)
    with st.container(key="strip"):
        _common.strip(found.figures)
    if found.every_s > 1.5:
        st.caption(f"Charts: each point of a gauge is the last sample of {units.seconds(found.every_s)}, each point of "
                   "a rate the mean over it.")
    if found.chosen > data.CHARTED:
        st.caption(f"Charts: the first {data.CHARTED} of {found.chosen} processes.")
    with st.container(key="charts"):
        _charts(found)
    _facts(found)


def _charts(found: data.Live) -> None:
    left, right = st.columns(2)
    with left:
        _common.chart(_bytes("KV bytes", _by(found, "kvobs.kv.usage", "device", "state"), stacked=True),
                      "KV bytes: no cache is alive in this range.")
        _common.chart(charts.lines("Re-allocations per second", "per second",
                                   _rates(found, "kvobs.kv.reallocations", "phase")),
                      "Re-allocations: none to show in this range.")
        _common.chart(_bytes("Memory of the process", _memory(found)),
                      "Memory: no source reports it here.")
    with right:
        _common.chart(_steps(found), "Step windows: no forward pass in this range.")
        _common.chart(_bytes("KV bytes per second", {
            **_rates(found, "kvobs.kv.written", word="written"),
            **_rates(found, "kvobs.kv.copied", word="copied again")}, per="/s"), "KV traffic: none in this range.")
        _common.chart(charts.lines("Own overhead: share of the engine's time in hooks", "share",
                                   _by(found, "kvobs.self.overhead", word="overhead")),
                      "Own overhead: no forward pass in this range.")


def _facts(found: data.Live) -> None:
    several = {one.process: _short(found, one.process) for one in found.processes} if found.chosen > 1 else {}
    _common.facts(found.availability, several)
    for flight in reversed(found.flights):
        _flight(flight)


def _flight(flight: Stored[FlightRecord]) -> None:
    """A record of the past: its time, and in plain sight what the verdicts of that moment were."""
    record, judged = flight.record, data.verdicts(flight.record)
    when = datetime.datetime.fromtimestamp(flight.wall_ns / 1e9, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
    if judged:
        asked = "" if record.requested_bytes is None else f", {units.size(record.requested_bytes)} asked of the device"
        st.markdown("\n".join([units.plain(f"{record.device}, {when} UTC{asked}"), "", *(
            f"- {one.about}: **{units.plain(one.verdict)}**. {units.plain(one.sentence)}" for one in judged)]))
    with st.expander(units.plain(f"Flight record: {record.reason} on {record.device}, {when} UTC")):
        st.text(record.message)
        for name, text in (("The minute before", record.windows), ("The allocator", record.snapshot)):
            if text:
                st.caption(name)
                st.json(json.loads(text), expanded=False)


def _bytes(title: str, named: dict[str, data.Samples], per: str = "", *, stacked: bool = False) -> Any:
    unit, scaled = charts.in_bytes(named, per)
    return charts.lines(title, unit, scaled, stacked=stacked)


def _short(found: data.Live, process: str) -> str:
    """A process in a legend: its number, and the beginning of its id as in the picker."""
    number = next((one.pid for one in found.processes if one.process == process), None)
    return f"{'' if number is None else number} {process[:6]}".strip()


def _by(found: data.Live, metric: str, *attributes: str, word: str = "") -> dict[str, data.Samples]:
    """One line per process and value of the attributes, aggregated over all others."""
    groups: dict[str, list[Series]] = {}
    for one in data.of(found.series, metric):
        words = [_short(found, one.process) if found.chosen > 1 else "", word,
                 *(one.attributes.get(name, "") for name in attributes)]
        groups.setdefault(" · ".join(filter(None, words)), []).append(one)
    return {name: data.over_time(series) for name, series in groups.items()}


def _rates(found: data.Live, metric: str, *attributes: str, word: str = "") -> dict[str, data.Samples]:
    return {name: data.rate(samples) for name, samples in _by(found, metric, *attributes, word=word).items()}


def _steps(found: data.Live) -> Any:
    """The mean with its deviation; of several processes the means alone, for bands would hide each other."""
    means = _by(found, "kvobs.window.step.mean", word="mean")
    if found.chosen > 1:
        return charts.lines("Step in the sliding window: mean", "seconds", means)
    variances = _by(found, "kvobs.window.step.variance", word="mean")
    return charts.band("Step in the sliding window: mean and one deviation", "seconds", means.get("mean", []),
                       [(when, math.sqrt(value)) for when, value in variances.get("mean", [])])


def _memory(found: data.Live) -> dict[str, data.Samples]:
    """All that is known of memory. What the allocator says of the CPU the heap says too."""
    return {**_by(found, "process.memory.usage", word="resident"),
            **_by(found, "kvobs.heap.usage", "state", word="heap"),
            **{name: samples for name, samples in _by(found, "kvobs.allocator.usage", "device", "state",
                                                      word="allocator").items() if "cpu" not in name},
            **_by(found, "kvobs.device.memory", "device", "part", word="device")}
