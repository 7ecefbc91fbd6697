"""Explain: what a recorded snapshot says about memory, why requests failed, and what other settings would do."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import streamlit as st

from kvobs.allocator.growth import parse
from kvobs.allocator.readers import Unreadable
from kvobs.allocator.report import MEANING, score_text
from kvobs.allocator.search import Found
from kvobs.allocator.whatif import Comparison
from streamlit_app import explain_data, units

CHANGES = 200  # requests listed one by one
OOMS = 16
FIGURE = re.compile(r"[\d,.]+ \S{1,3}")


def render(store: str) -> None:
    """The page. It reads a file that the user names, never the store."""
    st.header("Explain")
    st.caption("A snapshot of torch's allocator (torch\\.cuda\\.memory\\.\\_dump\\_snapshot), or a profiler's file. It "
               "is read in a process of its own that is held to limits, and this machine sends it nowhere.")
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
    with _progress("Reading the file") as tell:
        return explain_data.work_out(place, name, tell)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[explain_data.Progress]:
    bar = st.progress(0.0, what)

    def tell(share: float, words: str) -> None:
        bar.progress(min(share, 1.0), units.plain(words))

    try:
        yield tell
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


def _table(rows: list[dict[str, Any]]) -> None:
    """A table whose figures stay on one line with their units."""
    st.table([{name: cell.replace(" ", "\u00a0") if isinstance(cell, str) and FIGURE.fullmatch(cell) else cell
               for name, cell in row.items()} for row in rows], hide_index=True)


def _cut(found: int, most: int) -> None:
    if found > most:
        st.caption(f"The first {most:,} of {found:,} are shown.")


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
    _cut(len(device["ooms"]), OOMS)
    st.subheader("Where the reserved bytes are")
    reserved = device["reserved_bytes"]
    _table([{"class": name.replace("_", " "), "bytes": units.size(device["waste"][f"{name}_bytes"]),
             "exactly": units.raw(device["waste"][f"{name}_bytes"], "B"),
             "share": units.share(device["waste"][f"{name}_bytes"] / reserved) if reserved else "-",
             "what it is": meaning} for name, meaning in MEANING.items()])
    if device["pins"]:
        st.subheader("What keeps free memory from being returned")
        st.caption("The segments that hold back most: as long as a block in them is in use, their free bytes cannot go "
                   "back to the device.")
        _table([{"segment": f"{pin['address']:#x}", "held back": units.size(pin["held_back_bytes"]),
                 "of": units.size(pin["size_bytes"]), "by blocks": units.count(pin["blocks"]),
                 "smallest of them": units.size(pin["block_bytes"]), "allocated by": units.plain(pin["label"][:160])}
                for pin in device["pins"]])


def _calls(calls: list[dict[str, Any]]) -> None:
    if calls:
        st.subheader("Calls for device memory")
        _table([{"call": units.plain(one["name"]), "times": one["count"],
                 **{name: units.seconds(one[f"{key}_ns"] / 1e9) for name, key in (
                     ("in all", "total"), ("median", "median"), ("95th percentile", "p95"), ("longest", "max"),
                     ("the first", "first"))}} for one in calls])


def _holders(device: dict[str, Any]) -> None:
    st.subheader("Who holds memory")
    st.caption("Kinds are estimated from stack frames; each line names the rule that decided.")
    _table(explain_data.holder_rows(device))


def _what_if(found: explain_data.Explained, index: int, content: str) -> None:
    st.subheader("What if (modelled)")
    with st.form(f"explain-what-if-{content}-{index}"):
        columns = st.columns(2)
        expandable = columns[0].selectbox("expandable\\_segments", [explain_data.AS_RECORDED, "True", "False"])
        split = columns[1].number_input("max\\_split\\_size\\_mb", 0, 1 << 20, None,
                                        placeholder=explain_data.AS_RECORDED)
        divisions = columns[0].selectbox("roundup\\_power2\\_divisions",
                                         [explain_data.AS_RECORDED, "1", "2", "4", "8", "16"])
        collect = columns[1].number_input("garbage\\_collection\\_threshold", 0.0, 0.99, None, 0.05,
                                          placeholder=explain_data.AS_RECORDED)
        capacity = columns[0].number_input("Capacity in GiB", 0.01, 4096.0, None, 1.0,
                                           placeholder="as the file tells")
        growth = columns[1].selectbox("KV growth", [explain_data.AS_RECORDED, "cat", "static", "chunked:64",
                                                    "chunked:256", "paged:16", "paged:64"])
        with st.container(horizontal=True):
            asked = st.form_submit_button("Compare")
            search = st.form_submit_button("Find the best settings", help="Tries settings, beginning with these. The "
                                           "best have the fewest out-of-memory events, then the least reserved memory, "
                                           "then the least time in calls to the device.")
    if not (asked or search):
        return
    demand = (found, index, explain_data.changes_of(expandable, split, divisions, collect),
              None if capacity is None else int(capacity * 1024**3),
              None if growth == explain_data.AS_RECORDED else parse(growth))
    try:
        if search:
            with _progress("Trying settings") as tell:
                compared, best = explain_data.compare_with_best(*demand, tell)
            _best(best)
        else:
            with st.spinner("Running the demand twice"):
                compared = explain_data.compare(*demand)
    except ValueError as error:
        st.error(units.plain(f"{str(error).rstrip('.')}."))
        return
    _compared(compared)


def _best(found: Found) -> None:
    st.markdown(f"**The best of {len(found.ranking)} settings that were tried (modelled)**")
    _table(explain_data.ranked_rows(found))
    if found.line:
        st.success(units.plain(found.sentence))
        st.caption("To be set for the process before torch starts (modelled, not measured):")
        st.code(found.line, language=None, wrap_lines=True)
    else:
        st.info(units.plain(found.sentence))


def _compared(compared: Comparison) -> None:
    _table(explain_data.compared_rows(compared))
    st.caption(units.plain(f"{explain_data.off_by(compared)} {compared.capacity_reason}"))
    for note in compared.notes:
        st.warning(units.plain(note))
    if compared.verdicts_changed:
        _table([{"event": one.event if one.event >= 0 else "the start", "requested": units.size(one.requested_bytes),
                 "before": one.before, "after": one.after} for one in compared.verdicts_changed[:CHANGES]])
        _cut(len(compared.verdicts_changed), CHANGES)
    else:
        st.info("No request ends otherwise.")
    with st.expander("What the model cannot know"):
        for sentence in compared.unknown:
            st.write(units.plain(sentence))
    with st.expander("Where the estimated times come from"):
        for source in dict.fromkeys(one.source for run in (compared.before, compared.after) for one in run.call_time):
            st.write(units.plain(source))


def _definitions(device: dict[str, Any]) -> None:
    st.subheader("Published definitions of fragmentation, and why none decides")
    values = device["definitions"]
    _table([{"owner": units.plain(one["owner"]), "formula": units.plain(one["formula"]),
             "value": units.plain(_value(values[one["name"]], one["unit"], one["reason"])),
             "why it does not decide": units.plain(one["objection"])} for one in device["about_definitions"]])


def _value(value: float | None, unit: str, reason: str) -> str:
    if value is None:
        return reason
    return units.size(value) if unit == "By" else f"{value:.4f}"
