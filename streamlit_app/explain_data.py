"""What the Explain page shows: a file read, explained and kept, and what a change of settings would do."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from kvobs.allocator.explain import explain
from kvobs.allocator.growth import Growth
from kvobs.allocator.readers import Unreadable, read
from kvobs.allocator.readers._limits import MAX_FILE_BYTES
from kvobs.allocator.recording import DeviceRecording, Recording
from kvobs.allocator.replayed import Replay
from kvobs.allocator.report import page_data, page_of
from kvobs.allocator.search import Found, compare_best
from kvobs.allocator.settings import MIB
from kvobs.allocator.whatif import Comparison, Figures, case_of, what_if
from streamlit_app import units

KEPT = 4  # files explained
RANKED = 5  # settings
UPLOAD_MB = 500
AS_RECORDED = "as recorded"
Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Explained:
    """One file: what was read, what can be said, and its pictures: a whole report, and timeline with map alone, which
    is ``height`` pixels high.
    """

    recording: Recording
    replays: tuple[Replay, ...]
    document: dict[str, Any]
    report: str
    history: str
    height: int


@dataclass
class Kept:
    """The files that were explained last, by their content."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    found: OrderedDict[str, Explained] = field(default_factory=OrderedDict)

    def get(self, content: str, make: Callable[[], Explained]) -> Explained:
        """What was kept of this content, or else is made now."""
        with self.lock:
            if content in self.found:
                self.found.move_to_end(content)
                return self.found[content]
        made = make()
        with self.lock:
            self.found[content] = made
            while len(self.found) > KEPT:
                self.found.popitem(last=False)
        return made


def place_of(told: str) -> Path:
    """The file that somebody means by a path, which may begin with ``~``.

    Raises:
        Unreadable: there is no such user.
    """
    try:
        return Path(told).expanduser()
    except RuntimeError:
        raise Unreadable(f"{told} cannot be found: there is no such home directory.") from None


def content_of(path: Path) -> str:
    """A hash of a file's bytes.

    Raises:
        Unreadable: there is no such file, or it cannot be read.
    """
    try:
        if not path.is_file():
            raise Unreadable(f"There is no file {path}.")
        size = path.stat().st_size
        if not 0 < size <= MAX_FILE_BYTES:  # also what the kernel shows as files, some of which never end
            raise Unreadable(f"{path} cannot be read: it has {size:,} bytes, and from 1 to {MAX_FILE_BYTES:,} "
                             "are allowed.")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Unreadable(f"{path} cannot be read: {why}.") from None


@contextlib.contextmanager
def uploaded(source: BinaryIO) -> Iterator[Path]:
    """An upload as a file for as long as it is read."""
    handle, name = tempfile.mkstemp(prefix="kvobs-upload-")
    try:
        with os.fdopen(handle, "wb") as file:
            source.seek(0)
            while piece := source.read(1 << 20):
                file.write(piece)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def work_out(path: Path, name: str, progress: Progress) -> Explained:
    """Read a file (in the readers' own process) and explain it. ``progress`` is told shares of one and words.

    Raises:
        Unreadable: the file is none that kvobs reads.
    """
    recording = replace(read(path, progress=lambda share: progress(0.5 * share, "Reading the file")), file=name)
    told = explain(recording, progress=lambda words: progress(0.6, words))
    progress(0.8, "Drawing")
    drawn = page_data(recording, told.replays, told.document)
    return Explained(recording, told.replays, told.document, page_of(drawn), page_of(drawn, whole=False),
                     height_of(drawn))


def height_of(drawn: Mapping[str, Any]) -> int:
    """The pixels that timelines and maps need. A frame cannot tell: its page runs no script but its own."""
    lines = sum(420 for one in (*drawn["devices"], *drawn["usage"]) if one["timeline"] is not None)
    maps = [one["map"] for one in drawn["devices"]]
    return 60 + lines + sum(400 + 16 * int(one["rows"]) + 54 * min(int(one["blocks"]["count"]), 10) for one in maps)


def compare(found: Explained, index: int, changes: Mapping[str, str], capacity: int | None,
            growth: Growth | None) -> Comparison:
    """A device's demand with something changed.

    Raises:
        ValueError: a change that is not possible; a sentence or a part of one.
    """
    device: DeviceRecording = found.recording.devices[index]
    return what_if(found.recording, device, changes, capacity, growth, replay=found.replays[index])


def compare_with_best(found: Explained, index: int, changes: Mapping[str, str], capacity: int | None,
                      growth: Growth | None, progress: Progress) -> tuple[Comparison, Found]:
    """A device's demand under the best settings of all that are tried; the search begins with the changes.

    Raises:
        ValueError: as ``compare``.
    """
    case = case_of(found.recording, found.recording.devices[index], capacity)
    return compare_best(case, found.recording, changes, growth, replay=found.replays[index],
                        progress=lambda done, total: progress(done / total, f"{done} of {total} settings tried"))


def changes_of(expandable: str, max_split_mib: int | None, divisions: str, collect_at: float | None) -> dict[str, str]:
    """The options of PYTORCH_ALLOC_CONF that the page's controls stand for; what is left alone is not among them."""
    changes = {"expandable_segments": expandable, "roundup_power2_divisions": divisions}
    if max_split_mib is not None:
        changes["max_split_size_mb"] = str(max_split_mib)
    if collect_at is not None:
        changes["garbage_collection_threshold"] = f"{collect_at:g}"
    return {name: value for name, value in changes.items() if value != AS_RECORDED}


def holder_rows(device: Mapping[str, Any]) -> list[dict[str, str]]:
    """The table of a device's holders, which sums to its allocated bytes: the last row has those that are not named."""
    rows = [{"allocated by": units.plain(one["label"][:160]), "kind": one["kind"],
             "decided by": units.plain(one["rule"]), "bytes": units.size(one["bytes"]),
             "blocks": units.count(one["blocks"]), "share": units.share(one["share"])} for one in device["holders"]]
    rest = device["other_holders"]
    if rest["holders"]:
        rows.append({"allocated by": f"{rest['holders']:,} others", "kind": "", "decided by": "",
                     "bytes": units.size(rest["bytes"]), "blocks": "",
                     "share": units.share(rest["bytes"] / device["allocated_bytes"])})
    return rows


def compared_rows(found: Comparison) -> list[dict[str, str]]:
    """The table of before and after, with what was recorded beside it."""
    before, after, recorded = found.before, found.after, found.recorded

    def row(what: str, told: str, tell: Callable[[Figures], str]) -> dict[str, str]:
        return {"what": what, "recorded": told, "before (modelled)": tell(before), "after (modelled)": tell(after)}

    allocated = recorded.peak_allocated_bytes
    return [
        row("settings", "", lambda run: units.plain(run.settings.replace(",", ", ") or "the defaults")),
        row("KV growth", "", lambda run: units.plain(run.growth)),
        row("capacity", "", lambda run: _limit(run.capacity_bytes)),
        row("peak reserved", units.size(recorded.peak_reserved_bytes), lambda run: units.size(run.peak_reserved_bytes)),
        row("peak allocated", "absent" if allocated is None else units.size(allocated),
            lambda run: units.size(run.peak_allocated_bytes)),
        row("utilisation at the peaks", "", lambda run: _share(run.utilisation_at_peaks)),
        row("utilisation over time", "", lambda run: _share(run.utilisation_over_time)),
        row("device allocations", _told(recorded.device_allocs), lambda run: units.count(run.device_allocs)),
        row("device frees", _told(recorded.device_frees), lambda run: units.count(run.device_frees)),
        row("time in them (estimated)", "", _call_time),
        row("retries", "", lambda run: units.count(run.retries)),
        row("out of memory", _told(recorded.ooms), lambda run: units.count(run.ooms)),
    ]


def _told(value: int | None) -> str:
    return "unknown" if value is None else units.count(value)


def ranked_rows(found: Found) -> list[dict[str, str]]:
    """The table of the best settings."""
    return [{"settings (modelled)": units.plain(one.figures.settings.replace(",", ", ") or "the defaults"),
             "out of memory": units.count(one.figures.ooms),
             "peak reserved": units.size(one.figures.peak_reserved_bytes),
             "time in device calls (estimated)": _call_time(one.figures)} for one in found.ranking[:RANKED]]


def off_by(found: Comparison) -> str:
    """How far the model is from what happened, in one sentence."""
    off = found.recorded.difference_bytes
    return (f"Modelled under the recorded settings, the peak of reserved bytes is {off / MIB:+,.1f} MiB from the "
            "recorded one.")


def _limit(value: int | None) -> str:
    return "not limited" if value is None else units.size(value)


def _call_time(run: Figures) -> str:
    """From the least to the most that a source of costs gives."""
    known = sorted(estimate.ns / 1e9 for estimate in run.call_time if estimate.ns is not None)
    if not known:
        return "not known"
    low, high = units.seconds(known[0]), units.seconds(known[-1])
    missing = sorted({name for estimate in run.call_time for name in estimate.missing})
    return units.plain((low if low == high else f"{low} to {high}")
                       + (f"; of {' and '.join(missing)} not known" if missing else ""))


def _share(value: float | None) -> str:
    return "absent" if value is None else units.share(value)
