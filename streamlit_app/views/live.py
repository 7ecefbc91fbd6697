"""Live: what the process's caches and memory do now."""

from __future__ import annotations

import json
import math
from typing import Any

import streamlit as st

from kvobs.store import Series
from streamlit_app import charts, data
from streamlit_app.views import _common

RANGES: dict[str, float | None] = {"1 min": 60, "5 min": 300, "15 min": 900, "1 h": 3600, "all": None}
COLUMNS = 5


def render(store: str) -> None:
    """The page: pickers, then what refreshes itself every second."""
    st.header("Live")
    _page(store)


@_common.guarded
def _page(store: str) -> None:
    chosen = _common.pick_process(store, "live-process")
    reach = st.sidebar.radio("Range", list(RANGES), index=1, key="live-range", horizontal=True)
    _fresh(store, chosen, RANGES[reach])


@st.fragment(run_every=1.0)
def _fresh(store: str, chosen: str | None, range_s: float | None) -> None:
    _draw(store, chosen, range_s)


@_common.guarded
def _draw(store: str, chosen: str | None, range_s: float | None) -> None:
    found = data.live(store, chosen, range_s)
    picked = [process for process in found.processes if chosen in (None, process.process)]
    for problem in found.problems:
        st.warning(problem)
    _common.staleness(found.age_s, found.running, picked)
    _strip(found.figures)
    _charts(found)
    _facts(found)


def _strip(figures: list[data.Figure]) -> None:
    for start in range(0, len(figures), COLUMNS):
        for column, figure in zip(st.columns(COLUMNS), figures[start:start + COLUMNS], strict=False):
            with column, st.container(key=f"figure-{figure.key}"):
                st.metric(figure.label, figure.text, help=figure.help)
                st.caption(figure.raw if figure.age_s is None else f"{figure.raw} · {max(figure.age_s, 0):.1f} s ago")


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
        mean, variance = (_whole(found, f"kvobs.window.step.{name}") for name in ("mean", "variance"))
        _common.chart(charts.band("Step in the sliding window: mean and one deviation", "seconds", mean,
                                  [(when, math.sqrt(value)) for when, value in variance]),
                      "Step windows: no forward pass in this range.")
        _common.chart(_bytes("KV bytes per second", {
            "written": data.rate(_whole(found, "kvobs.kv.written")),
            "copied again": data.rate(_whole(found, "kvobs.kv.copied"))}, per="/s"), "KV traffic: none in this range.")
        _common.chart(charts.lines("Own overhead: share of the engine's time in hooks", "share",
                                   {"overhead": _whole(found, "kvobs.self.overhead")}),
                      "Own overhead: no forward pass in this range.")


def _facts(found: data.Live) -> None:
    st.subheader("What can be seen here, and what not")
    facts = sorted((fact.record for fact in found.availability), key=lambda fact: (fact.available, fact.subject))
    st.table([{"subject": fact.subject, "seen": "yes" if fact.available else "no", "why": fact.reason}
                  for fact in facts], hide_index=True)
    for flight in reversed(found.flights):
        record = flight.record
        with st.expander(f"Flight record: {record.reason} on {record.device}"):
            st.text(record.message)
            for name, text in (("The minute before", record.windows), ("The allocator", record.snapshot)):
                if text:
                    st.caption(name)
                    st.json(json.loads(text), expanded=False)


def _bytes(title: str, named: dict[str, data.Samples], per: str = "", *, stacked: bool = False) -> Any:
    unit, scaled = charts.in_bytes(named, per)
    return charts.lines(title, unit, scaled, stacked=stacked)


def _label(process: str, words: list[str], several: bool) -> str:
    return " · ".join([*([process[:8]] if several else []), *words])


def _by(found: data.Live, metric: str, *attributes: str) -> dict[str, data.Samples]:
    """One line per process and value of the attributes, aggregated over all others."""
    groups: dict[str, list[Series]] = {}
    processes = data.by_process(found.series)
    for one in data.of(found.series, metric):
        words = [one.attributes.get(name, "") for name in attributes]
        groups.setdefault(_label(one.process, words, len(processes) > 1), []).append(one)
    return {name: data.over_time(series) for name, series in groups.items()}


def _rates(found: data.Live, metric: str, attribute: str) -> dict[str, data.Samples]:
    return {name: data.rate(samples) for name, samples in _by(found, metric, attribute).items()}


def _whole(found: data.Live, metric: str) -> data.Samples:
    """A metric of the first chosen process that has it: windows of several processes do not add up."""
    for series in data.by_process(data.of(found.series, metric)).values():
        return data.over_time(series)
    return []


def _memory(found: data.Live) -> dict[str, data.Samples]:
    named = {"resident": _by(found, "process.memory.usage"), "heap": _by(found, "kvobs.heap.usage", "state"),
             "allocator": {name: samples for name, samples in _by(found, "kvobs.allocator.usage", "device",
                                                                  "state").items() if "cpu" not in name},
             "device": _by(found, "kvobs.device.memory", "device", "part")}
    return {" · ".join(filter(None, (group, name))): samples
            for group, some in named.items() for name, samples in some.items()}
