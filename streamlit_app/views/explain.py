"""Explain: what a recorded snapshot says about memory, why requests failed, and what other settings would do."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import streamlit as st

from kvobs.allocator.growth import parse
from kvobs.allocator.readers import Unreadable
from kvobs.allocator.report import MEANING, score_text
from streamlit_app import explain_data, units

CHANGES = 200  # requests listed one by one
OOMS = 16


def render(store: str) -> None:
    """The page. It reads a file that the user names, never the store."""
    st.header("Explain")
    st.caption("A snapshot of torch's allocator (torch\\.cuda\\.memory\\.\\_dump\\_snapshot), or a profiler's file. It "
               "is read in a process of its own that is held to limits, and leaves this machine for nowhere.")
    way = st.radio("The file is", ["on this machine", "uploaded"], horizontal=True, key="explain-way")
    try:
        found = _uploaded() if way == "uploaded" else _named()
    except Unreadable as error:
        st.error(units.plain(str(error)))
        return
    if found is not None:
        _page(*found)


def _named() -> tuple[str, explain_data.Explained] | None:
    path = st.text_input("Path", key="explain-path", placeholder="/path/to/snapshot.pickle")
    if not path.strip():
        st.info("Name a file, or upload one.")
        return None
    place = explain_data.place_of(path.strip())
    content = explain_data.content_of(place)
    return content, _kept().get(f"{content} {place.name}", functools.partial(_work_out, place, place.name))


def _uploaded() -> tuple[str, explain_data.Explained] | None:
    source = st.file_uploader("File", key="explain-upload", help=f"At most {explain_data.UPLOAD_MB} MB.",
                              max_upload_size=explain_data.UPLOAD_MB)
    if source is None:
        st.info("Upload a file, or name one on this machine.")
        return None
    with explain_data.uploaded(source) as place:
        try:
            content = explain_data.content_of(place)
            return content, _kept().get(f"{content} {source.name}", functools.partial(_work_out, place, source.name))
        except Unreadable as error:  # people know the upload by its own name
            raise Unreadable(str(error).replace(str(place), source.name)) from None


@st.cache_resource
def _kept() -> explain_data.Kept:
    return explain_data.Kept()


def _work_out(place: Path, name: str) -> explain_data.Explained:
    bar = st.progress(0.0, "Reading the file")

    def tell(share: float, words: str) -> None:
        bar.progress(min(share, 1.0), units.plain(words))

    try:
        return explain_data.work_out(place, name, tell)
    finally:
        bar.empty()


def _page(content: str, found: explain_data.Explained) -> None:
    settings = found.document["settings"]
    st.caption(f"{units.plain(found.recording.file)}: {units.plain(found.recording.schema)}. " + (
        "The file does not tell the allocator's settings; the defaults are assumed." if settings is None
        else f"Allocator settings: {units.plain(settings or 'the defaults')}."))
    st.download_button("Report as one HTML file", found.report, f"{Path(found.recording.file).stem}.html", "text/html",
                       on_click="ignore")
    for note in found.recording.notes:
        st.warning(units.plain(note))
    devices = found.document["devices"]
    index = 0
    if len(devices) > 1:
        index = st.selectbox("Device", range(len(devices)), format_func=lambda at: f"Device {devices[at]['device']}",
                             key=f"explain-device-{content}")
    if devices:
        _device(found, index)
    if devices or found.recording.usage:
        # The page's own policy runs no script but the one that it came with, whatever the file's texts are.
        st.iframe(found.history, height=found.height)
    _calls(found.document["device_calls"])
    if devices:
        _holders(devices[index])
        _what_if(found, index, content)
        _definitions(devices[index])


def _device(found: explain_data.Explained, index: int) -> None:
    device, score = found.document["devices"][index], score_text(found.replays[index])
    strip = [("Reserved", "reserved_bytes"), ("Allocated", "allocated_bytes"), ("Pending free", "pending_free_bytes"),
             ("Free", "free_bytes"), ("Largest free", "largest_free_bytes")]
    with st.container(key="strip-explain"):
        for column, (label, name) in zip(st.columns(len(strip)), strip, strict=True):
            with column, st.container(key=f"figure-{name.removesuffix('_bytes')}"):
                st.metric(label, units.size(device[name]))
                st.caption(units.raw(device[name], "B"))
    st.subheader("Verdicts")
    st.caption(units.plain(score))
    if not device["ooms"]:
        st.info("No out-of-memory event is recorded on this device.")
    for oom in device["ooms"][:OOMS]:
        words = " ".join(filter(None, (oom["sentence"], oom["note"])))
        asker = f" by {units.plain(oom['label'][:160])} ({oom['kind']})" if oom["label"] else ""
        st.error(f"**{units.plain(oom['verdict'] or 'Not judged')}**: {units.size(oom['requested_bytes'])} requested"
                 f"{asker}, the device had {units.size(oom['device_free_bytes'])} left. "
                 f"{units.plain(words)}")
    st.subheader("Where the reserved bytes are")
    reserved = device["reserved_bytes"]
    st.table([{"class": name.replace("_", " "), "bytes": units.size(device["waste"][f"{name}_bytes"]),
               "exactly": units.raw(device["waste"][f"{name}_bytes"], "B"),
               "share": units.share(device["waste"][f"{name}_bytes"] / reserved) if reserved else "-",
               "what it is": meaning} for name, meaning in MEANING.items()], hide_index=True)


def _calls(calls: list[dict[str, Any]]) -> None:
    if calls:
        st.subheader("Calls for device memory")
        st.table([{"call": units.plain(one["name"]), "times": one["count"],
                   **{name: units.seconds(one[f"{key}_ns"] / 1e9) for name, key in (
                       ("in all", "total"), ("median", "median"), ("95th percentile", "p95"), ("longest", "max"),
                       ("the first", "first"))}} for one in calls], hide_index=True)


def _holders(device: dict[str, Any]) -> None:
    st.subheader("Who holds memory")
    st.caption("Kinds are estimated from stack frames; each line names the rule that decided.")
    st.table([{"allocated by": units.plain(one["label"][:160]), "kind": one["kind"],
               "decided by": units.plain(one["rule"]), "bytes": units.size(one["bytes"]), "blocks": one["blocks"],
               "share": units.share(one["share"])} for one in device["holders"]], hide_index=True)


def _what_if(found: explain_data.Explained, index: int, content: str) -> None:
    st.subheader("What if (modelled)")
    with st.form(f"explain-what-if-{content}-{index}"):
        columns = st.columns(3)
        expandable = columns[0].selectbox("expandable\\_segments", [explain_data.AS_RECORDED, "True", "False"])
        split = columns[1].number_input("max\\_split\\_size\\_mb (0: as recorded)", 0, 1 << 20, 0)
        divisions = columns[2].selectbox("roundup\\_power2\\_divisions (0: as recorded)", [0, 1, 2, 4, 8, 16])
        collect = columns[0].number_input("garbage\\_collection\\_threshold (0: as recorded)", 0.0, 0.99, 0.0, 0.05)
        capacity = columns[1].number_input("Capacity in GiB (0: as the file tells)", 0.0, 4096.0, 0.0, 1.0)
        growth = columns[2].selectbox("KV growth", [explain_data.AS_RECORDED, "cat", "static", "chunked:64",
                                                    "chunked:256", "paged:16", "paged:64"])
        asked = st.form_submit_button("Compare")
    if not asked:
        return
    changes = explain_data.changes_of(expandable, int(split), int(divisions), float(collect))
    try:
        with st.spinner("Running the demand twice"):
            compared = explain_data.compare(found, index, changes, int(capacity * 1024**3) or None,
                                            None if growth == explain_data.AS_RECORDED else parse(growth))
    except ValueError as error:
        st.error(units.plain(f"{str(error).rstrip('.')}."))
        return
    st.table(explain_data.compared_rows(compared), hide_index=True)
    st.caption(units.plain(f"{explain_data.off_by(compared)} {compared.capacity_reason}"))
    for note in compared.notes:
        st.warning(units.plain(note))
    if compared.verdicts_changed:
        st.table([{"event": one.event if one.event >= 0 else "the start", "requested": units.size(one.requested_bytes),
                   "before": one.before, "after": one.after} for one in compared.verdicts_changed[:CHANGES]],
                 hide_index=True)
    else:
        st.info("No request ends otherwise.")
    with st.expander("What the model cannot know"):
        for sentence in compared.unknown:
            st.write(units.plain(sentence))


def _definitions(device: dict[str, Any]) -> None:
    st.subheader("Published definitions of fragmentation, and why none decides")
    values = device["definitions"]
    st.table([{"owner": units.plain(one["owner"]), "formula": units.plain(one["formula"]),
               "value": units.plain(_value(values[one["name"]], one["unit"], one["reason"])),
               "why it does not decide": units.plain(one["objection"])} for one in device["about_definitions"]],
             hide_index=True)


def _value(value: float | None, unit: str, reason: str) -> str:
    if value is None:
        return reason
    return units.size(value) if unit == "By" else f"{value:.4f}"
