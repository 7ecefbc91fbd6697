"""``kvobs whatif``: the memory demand of a recording under other settings, before and after."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvobs.cli._errors import Refused
from kvobs.cli._explain import progress, read
from kvobs.cli._output import bar, print_table, say
from kvobs.cli._sizes import parse_size, size_text

if TYPE_CHECKING:
    from kvobs.allocator.growth import Growth
    from kvobs.allocator.recording import DeviceRecording, Recording
    from kvobs.allocator.search import Candidate, Found
    from kvobs.allocator.whatif import Comparison, Figures

MOST_ROWS = 64  # requests listed one by one
MOST_RANKED = 10
SHOWN_ROWS = 10  # to people
SHOWN_RANKED = 5
LEAST_CAPACITY = 2 << 20  # bytes: the smallest segment


def whatif(file: Annotated[Path, typer.Argument(help="A memory snapshot of torch (.pickle, .json, .gz).",
                                                show_default=False)],
           options: Annotated[list[str] | None, typer.Option(
               "--set", metavar="OPTION=VALUE",
               help="An option of PYTORCH_ALLOC_CONF (OPTION:VALUE does too); may be repeated.")] = None,
           capacity: Annotated[str | None, typer.Option(
               help="What the device can give, such as 24GiB.", show_default="as the file tells")] = None,
           kv_growth: Annotated[str | None, typer.Option(
               help="How the KV cache grows: cat, static, chunked:N or paged:N (tokens).",
               show_default="as recorded")] = None,
           search: Annotated[bool, typer.Option(
               "--search", help="Try settings and show the best: fewest OOMs, then least reserved, then least time in "
                                "calls to the device.")] = False,
           device: Annotated[int | None, typer.Option(help="Only this device.", min=0, show_default="all")] = None,
           as_json: Annotated[bool, typer.Option("--json", help="As a JSON document.")] = False) -> None:
    """Show what a recorded demand would need under other settings (modelled): kvobs whatif FILE --set OPTION=VALUE.

    "recorded" is what the file tells, "before" what the model gives under the settings of the file, "after" what it
    gives under others. How far the first two agree says how far to trust the third.
    """
    changes = _changes(options or [])
    growth = _growth(kv_growth)
    limit = None if capacity is None else parse_size(capacity, "--capacity", LEAST_CAPACITY)
    with progress() as tell:
        recording = read(file, tell)
    rows = [_compared(recording, one, changes, limit, growth, search) for one in _devices(recording, device)]
    if as_json:
        print(json.dumps({"file": recording.file, "schema": recording.schema,
                          "devices": [_row(comparison, found) for comparison, found in rows]}, indent=2))
        return
    for index, (comparison, found) in enumerate(rows):
        print("\n" * (index > 0), end="")
        _show(comparison, found)
    if not (changes or search) and limit is None and growth is None:
        print("\nNothing was changed: --search tries settings; --set, --capacity, --kv-growth change one thing each.")


def _changes(options: list[str]) -> dict[str, str]:
    from kvobs.allocator.settings import Settings
    from kvobs.allocator.whatif import changed

    changes = {}
    for option in options:
        key, separator, value = option.partition("=" if "=" in option else ":")  # PYTORCH_ALLOC_CONF has colons
        if not separator or not key.strip() or not value.strip():
            raise Refused(f"'{option}' is not of the form OPTION=VALUE, such as expandable_segments=true.")
        changes[key.strip()] = value.strip()
    try:
        changed(Settings(), changes)
    except ValueError as error:
        raise Refused(f"{error}.") from None
    return changes


def _growth(text: str | None) -> Growth | None:
    from kvobs.allocator.growth import parse

    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise Refused(f"{error}.") from None


def _devices(recording: Recording, wanted: int | None) -> list[DeviceRecording]:
    found = [one for one in recording.devices if wanted in (None, one.device)]
    if not recording.devices:
        raise Refused(f"{recording.file} ({recording.schema}) tells no allocations of a device, so that nothing can be "
                      "asked again.")
    if not found:
        there = ", ".join(str(one.device) for one in recording.devices)
        raise Refused(f"{recording.file} has no device {wanted}; it has {there}.")
    if wanted is not None:
        return found
    return [one for one in found if one.state or len(one.events)] or found[:1]


def _compared(recording: Recording, device: DeviceRecording, changes: dict[str, str], capacity: int | None,
              growth: Growth | None, search: bool) -> tuple[Comparison, Found | None]:
    from kvobs.allocator.replay import replay
    from kvobs.allocator.search import compare_best
    from kvobs.allocator.whatif import case_of, compare

    try:
        case = case_of(recording, device, capacity)
        followed = replay(device, case.settings)
        if not search:
            return compare(case, recording, changes, growth, replay=followed), None
        with bar("Trying settings") as advance:
            return compare_best(case, recording, changes, growth, replay=followed, progress=advance)
    except ValueError as error:
        raise Refused(str(error)) from None


def _row(comparison: Comparison, found: Found | None) -> dict[str, Any]:
    before, after = (replace(run, failures=run.failures[:MOST_ROWS]) for run in (comparison.before, comparison.after))
    row = asdict(replace(comparison, before=before, after=after,
                         verdicts_changed=comparison.verdicts_changed[:MOST_ROWS]))
    changed = len(comparison.verdicts_changed)
    ordered = {"device": row.pop("device"), "modelled": True} | row | {"verdicts_changed_count": changed}
    if found is not None:
        ordered["search"] = {"modelled": True, "line": found.line, "sentence": found.sentence, "tried": len(
            found.ranking), "ranking": [_ranked(one) for one in found.ranking[:MOST_RANKED]]}
    return ordered


def _ranked(one: Candidate) -> dict[str, Any]:
    figures = one.figures
    return {"settings": figures.settings, "ooms": figures.ooms, "peak_reserved_bytes": figures.peak_reserved_bytes,
            "call_time": [asdict(estimate) for estimate in figures.call_time]}


def _show(comparison: Comparison, found: Found | None) -> None:
    before, after, recorded = comparison.before, comparison.after, comparison.recorded
    given = "" if before.capacity_bytes == after.capacity_bytes else " After, it is the one given."
    say(f"Device {comparison.device}. {comparison.capacity_reason}{given}")
    print_table(("", "recorded", "before (modelled)", "after (modelled)"), [
        ("settings", "", before.settings or "defaults", after.settings or "defaults"),
        ("KV growth", "", before.growth, after.growth),
        ("capacity", "", _limit(before), _limit(after)),
        ("peak reserved", _bytes(recorded.peak_reserved_bytes), _bytes(before.peak_reserved_bytes),
         _bytes(after.peak_reserved_bytes)),
        ("peak allocated", _bytes(recorded.peak_allocated_bytes), _bytes(before.peak_allocated_bytes),
         _bytes(after.peak_allocated_bytes)),
        ("utilisation at the peaks", "", _share(before.utilisation_at_peaks), _share(after.utilisation_at_peaks)),
        ("utilisation over time", "", _share(before.utilisation_over_time), _share(after.utilisation_over_time)),
        ("device allocations", _count(recorded.device_allocs), str(before.device_allocs), str(after.device_allocs)),
        ("device frees", _count(recorded.device_frees), str(before.device_frees), str(after.device_frees)),
        ("time in them (estimated)", "", _time(before), _time(after)),
        ("retries", "", str(before.retries), str(after.retries)),
        ("OOMs", _count(recorded.ooms), str(before.ooms), str(after.ooms))])
    say(f"The model's peak under the recorded settings differs from the recorded one by "
        f"{recorded.difference_bytes / (1 << 20):+,.1f} MiB.")
    if changed := comparison.verdicts_changed:
        print("\nRequests that end otherwise (modelled):")
        print_table(("event", "bytes", "before", "after"), [
            (str(one.event) if one.event >= 0 else "the start", f"{one.requested_bytes:,}", one.before, one.after)
            for one in changed[:SHOWN_ROWS]])
        if len(changed) > SHOWN_ROWS:
            print(f"and {len(changed) - SHOWN_ROWS:,} more")
    if comparison.kv is not None:
        kv = comparison.kv
        print()
        say(f"KV cache (modelled): {kv.chains} tensors; copied while growing {_bytes(kv.copied_bytes_before)} before, "
            f"{_bytes(kv.copied_bytes_after)} after; {_bytes(kv.tail_bytes)} at their ends hold no token.")
    if found is not None:
        _tell(found)
    if comparison.notes:
        print()
    for sentence in comparison.notes:
        say(sentence)
    print("\nWhere the estimated times come from:")
    for source in dict.fromkeys(estimate.source for run in (before, after) for estimate in run.call_time):
        say(f"- {source}")
    print("\nWhat the model cannot know:")
    for sentence in comparison.unknown:
        say(f"- {sentence}")


def _tell(found: Found) -> None:
    print(f"\nThe best of {len(found.ranking)} settings that were tried (modelled):")
    print_table(("settings", "OOMs", "peak reserved", "time in calls (estimated)"), [
        (one.figures.settings or "defaults", str(one.figures.ooms), _bytes(one.figures.peak_reserved_bytes),
         _time(one.figures)) for one in found.ranking[:SHOWN_RANKED]])
    say(found.sentence)
    if found.line:
        say(found.line)


def _count(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _bytes(value: int | None) -> str:
    return "unknown" if value is None else size_text(value)


def _limit(run: Figures) -> str:
    return "without limit" if run.capacity_bytes is None else _bytes(run.capacity_bytes)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _time(run: Figures) -> str:
    known = [estimate.ns for estimate in run.call_time if estimate.ns is not None]
    if not known:
        return "unknown"
    low, high = min(known) / 1e6, max(known) / 1e6
    words = f"{low:,.1f} ms" if low == high else f"{low:,.1f} to {high:,.1f} ms"
    missing = sorted({name for estimate in run.call_time for name in estimate.missing})
    return words + (f"; of {' and '.join(missing)} not known" if missing else "")
