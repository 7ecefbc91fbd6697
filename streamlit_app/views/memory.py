"""Memory map: the segments and blocks of each device now, by holder, with its sums beside the metrics."""

from __future__ import annotations

import functools

import streamlit as st

from streamlit_app import data, memory_chart, memory_data, processes, units
from streamlit_app.views import _common

HELP = ("While this page is open the process takes a snapshot of its allocator about once a second, less often where "
        "that takes long. Holders are known by address: live caches of transformers and the weights of models that "
        "filled one. What is of nobody known is told as other.")
PINNING = ("A segment is pinned when parts of it are free and blocks in use keep it from going back to the device; of "
           "an expandable one, only the pages that are partly in use count.")


def render(store: str) -> None:
    """The page: a process, then what refreshes itself twice a second."""
    st.header("Memory map")
    st.caption(HELP)
    _common.watch(functools.partial(data.processes_seen, store))
    _page(store)


@_common.guarded
def _page(store: str) -> None:
    chosen = _common.pick_process(store)
    if engine := processes.engine_of(store, chosen):
        st.info(f"This page tells of accelerators' allocators, and knows as holders transformers' caches only: who "
                f"holds {engine}'s pool of KV blocks is on the page Requests.")
    _fresh(store, chosen)


@st.fragment(run_every=0.5)
def _fresh(store: str, chosen: str | None) -> None:
    _draw(store, chosen)


@_common.guarded
def _draw(store: str, chosen: str | None) -> None:
    found = memory_data.maps(store, chosen)
    for reason in found.reasons:
        (st.warning if found.devices else st.info)(units.plain(reason))
    for device in found.devices:
        _device(device, f"{device.process[:6]} · " if len({one.process for one in found.devices}) > 1 else "")
    if found.more:
        st.caption(f"{found.more} more devices are not drawn.")


def _device(device: memory_data.DeviceMap, prefix: str) -> None:
    key = f"{device.process}-{device.found.device}"
    st.subheader(units.plain(f"{prefix}{device.found.device}"))
    _state(device)
    total = device.sums
    strip = [("reserved", "Reserved", total.reserved), ("allocated", "Allocated", total.allocated),
             ("pending", "Pending free", total.pending), ("free", "Free", total.free),
             ("largest", "Largest free block", total.largest_free)]
    with st.container(key=f"strip-map-{key}"):
        for column, (name, label, value) in zip(st.columns(len(strip)), strip, strict=True):
            with column, st.container(key=f"figure-map-{name}-{key}"):
                st.metric(label, units.size(value))
                st.caption(units.raw(value, "B"))
    _check(device)
    _charts(device)
    _tables(device)


def _state(device: memory_data.DeviceMap) -> None:
    """How old it is, and what it cost."""
    found = device.found
    took = (f"The snapshot took {units.seconds(found.duration_ns / data.SECOND_NS)} of CPU time"
            + (f", so that there is one every {units.seconds(found.every_ns / data.SECOND_NS)} at most."
               if found.every_ns > data.SECOND_NS else "."))
    age = units.seconds(device.age_s)
    if not device.alive:
        st.warning(f"The process has ended: this map is of {age} ago.")
    elif device.stale:
        st.warning(f"Stale: this map is {age} old, although the process is running.")
    else:
        (st.success if device.age_s <= data.STALE_S else st.info)(
            f"{'Live: this' if device.age_s <= data.STALE_S else 'This'} map is {age} old. {took}")


def _check(device: memory_data.DeviceMap) -> None:
    compared = [check for check in device.checks if check.equal is not None]
    metric = "" if device.metric_age_s is None else f" The metrics are {units.seconds(device.metric_age_s)} old."
    if not compared:
        st.info("No metric of the same poll is in the store, so that there is nothing to compare with.")
    elif all(check.equal for check in compared):
        st.caption(f"The sums of this map equal the metrics of the same poll ({len(compared)} of {len(compared)}), to "
                   f"the byte.{metric}")
    elif not device.found.steady:
        st.warning(f"The engine allocated while this map was taken, so that it is of another moment than the metrics."
                   f"{metric}")
    else:
        st.error(f"The sums of this map differ from the metrics of the same poll.{metric}")


def _charts(device: memory_data.DeviceMap) -> None:
    used = {memory_data.category(block, device.names) for segment in device.state for block in segment.blocks}
    kept = st.session_state.setdefault("memory-colours", {})
    colour = kept[device.process, device.found.device] = memory_chart.colours(
        used, kept.get((device.process, device.found.device), {}))
    _common.chart(memory_chart.overview(device, colour), "Nothing is reserved on this device.")
    bars = memory_chart.segments(device, colour)
    if bars is not None:
        st.altair_chart(bars, width="stretch")
    st.caption(f"{device.sums.segments:,} segments, {device.sums.blocks:,} blocks. {PINNING}")


def _tables(device: memory_data.DeviceMap) -> None:
    with st.expander("Sums beside the metrics"):
        st.table([{name: units.plain(cell) for name, cell in row.items()} for row in memory_data.check_rows(device)],
                 hide_index=True)
    if device.pins:
        held_back = units.size(sum(pin.held_back_bytes for pin in device.pins.values()))
        with st.expander(f"Pinned segments: {len(device.pins):,}, which hold {held_back} back"):
            st.table(memory_data.pin_rows(device), hide_index=True)
    with st.expander("Published definitions of fragmentation, and why none decides"):
        st.table([{"owner": units.plain(one.owner), "formula": units.plain(one.formula),
                   "value": units.plain(one.reason if one.value is None else units.size(one.value)
                                        if one.unit == "By" else f"{one.value:.4f}"),
                   "why it does not decide": units.plain(one.objection)} for one in device.definitions],
                 hide_index=True)
