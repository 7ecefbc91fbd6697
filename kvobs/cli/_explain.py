"""``kvobs explain``: what failed in a memory snapshot, why, who held what."""

from __future__ import annotations

import gc
import importlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvobs.cli._errors import Refused
from kvobs.cli._output import plain, print_table, say
from kvobs.cli._sizes import parse_size, size_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvobs.allocator.recording import Recording

ENGINES = ("auto", "C++", "Python")
MOST_OOMS = 64  # told one by one
MOST_HOLDERS = 10
MOST_PINS = 5


def explain(file: Annotated[Path, typer.Argument(help="A memory snapshot of torch (.pickle, .json, .gz), a memory "
                                                      "timeline, a Kineto trace or an Nsight Systems export (.sqlite).",
                                                 show_default=False)],
            as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
            html: Annotated[Path | None, typer.Option(help="Write a page with pictures (one file) here.",
                                                      show_default=False)] = None,
            request: Annotated[str | None, typer.Option(help="Judge a request of this size too, for instance 512MiB, "
                                                             "asked of the file's last state.",
                                                        show_default=False)] = None,
            stream: Annotated[int, typer.Option(help="The stream of that request.")] = 0,
            device_free: Annotated[str | None, typer.Option(help="What the device has left then, for instance 2GiB.",
                                                            show_default="unknown")] = None,
            engine: Annotated[str, typer.Option(help="What replays: auto, C++ or Python (slower, says the same).")
                              ] = "auto") -> None:
    """Explain a memory snapshot: what failed and why, who held what, how far the replay agrees.

    torch.cuda.memory._record_memory_history() begins the history, torch.cuda.memory._dump_snapshot(FILE) writes the
    file. What other settings would have done: kvobs whatif FILE --search.
    """
    if engine not in ENGINES:
        raise Refused(f"'{engine}' is no engine; allowed are {', '.join(ENGINES)}.")
    if request is None and (stream or device_free is not None):
        raise Refused("The options --stream and --device-free belong to --request.")
    if html is not None and os.path.realpath(html) == os.path.realpath(file):
        raise Refused("The page would take the place of the file that it is about; name another for --html.")
    size = None if request is None else parse_size(request, "--request", 1)
    left = None if device_free is None else parse_size(device_free, "--device-free", 0)
    with progress() as tell, no_collector():
        recording = read(file, tell)

        from kvobs.allocator.explain import Hypothetical
        from kvobs.allocator.explain import explain as explain_recording
        from kvobs.allocator.verdict import Request

        asked = [] if size is None else [Hypothetical(Request(size, stream), left)]
        try:
            explained = explain_recording(recording, asked, engine, tell)
        except ValueError as error:
            raise Refused(str(error)) from None
        if html is not None:
            from kvobs.allocator.report import write_html

            tell("Drawing")
            try:
                write_html(recording, explained.replays, explained.document, html)
            except OSError as error:
                raise Refused(f"The page cannot be written to {html} "
                              f"({(error.strerror or str(error)).lower()}).") from None
    if as_json:
        print(json.dumps(explained.document, indent=2))
    else:
        _tell(explained.document)
        if html is not None:
            print()
            say(f"The page is {html}.")


def read(file: Path, tell: Callable[[str], None]) -> Recording:
    """The recording in a file.

    Raises:
        Refused: it cannot be read.
    """
    from kvobs.allocator.readers import Unreadable
    from kvobs.allocator.readers import read as read_recording

    # The child that reads has a core of its own; what comes next is made ready meanwhile.
    ready = Thread(target=_prepare, daemon=True)
    ready.start()
    tell(f"Reading {file.name}")
    try:
        return read_recording(file)
    except Unreadable as error:
        raise Refused(str(error)) from None
    finally:
        ready.join()


def _prepare() -> None:
    from kvobs.allocator import core

    importlib.import_module("kvobs.allocator.explain")
    core.why_not()


@contextmanager
def no_collector() -> Iterator[None]:
    """Without the cyclic garbage collector: it would look again and again at millions of objects that all live on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Says what is being done while it lasts, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(Text(plain(text)))


def _tell(document: dict[str, Any]) -> None:
    say(f"{document['file']}: {document['schema']}")
    if document["devices"]:
        say(f"Settings: {_settings(document['settings'])}")
    for note in document["notes"]:
        say(f"Note: {note}")
    for device in document["devices"]:
        print()
        _device(device)
    if document["device_calls"]:
        print("\nCalls for device memory (the first of a process may contain the making of its context)")
        print_table(("call", "calls", "median us", "p95 us", "longest us", "first call us"), [
            (call["name"], f"{call['count']:,}", *(f"{call[name] / 1000:,.1f}"
                                                   for name in ("median_ns", "p95_ns", "max_ns", "first_ns")))
            for call in document["device_calls"]])
    for usage in document["usage"]:
        peaks = [f"{name} {size_text(usage[key])}" for name, key in (
            ("allocated", "peak_allocated_bytes"), ("reserved", "peak_reserved_bytes")) if usage[key] is not None]
        print()
        named = "a device that the file does not name" if usage["device"] == "unknown" else usage["device"]
        say(f"Usage of {named}: {usage['samples']:,} samples, peak {', '.join(peaks) or 'not told'}"
            + ("; of each category at a time of its own:" if usage["peak_by_category_bytes"] else ""))
        for name, value in sorted(usage["peak_by_category_bytes"].items(), key=lambda pair: -pair[1]):
            say(f"  {name}: peak {size_text(value)}")
    if any(device["ooms"] for device in document["devices"]):
        print()
        say(f"What would other settings have done? kvobs whatif {shlex.quote(document['file'])} --search")


def _settings(conf: str | None) -> str:
    return "not told by the file; the defaults are assumed" if conf is None else conf or "the defaults"


def _device(device: dict[str, Any]) -> None:
    say(f"Device {device['device']}, last state: {size_text(device['reserved_bytes'])} reserved in "
        f"{device['segments']:,} segments, {size_text(device['allocated_bytes'])} allocated, "
        f"{size_text(device['free_bytes'])} free (largest block {size_text(device['largest_free_bytes'])}), "
        f"{size_text(device['pending_free_bytes'])} pending")
    say(f"  {replay_text(device['replay'])}")
    for oom in device["ooms"][:MOST_OOMS]:
        asker = f" by {oom['label']} ({oom['kind']})" if oom["label"] else ""
        say(f"  Out of memory at event {oom['event']:,}: {size_text(oom['requested_bytes'])} requested{asker}, the "
            f"device had {size_text(oom['device_free_bytes'])} left: {oom['verdict'] or 'no verdict'}. "
            f"{oom['sentence']} {oom['note']}".rstrip())
    if len(device["ooms"]) > MOST_OOMS:
        say(f"  {len(device['ooms']) - MOST_OOMS:,} more times out of memory; --json tells all.")
    if not device["ooms"]:
        print("  No out-of-memory event is recorded.")
    for asked in device["requests"]:
        say(f"  A request of {size_text(asked['requested_bytes'])} now: {asked['verdict']}. {asked['sentence']}")
    _tables(device)


def _tables(device: dict[str, Any]) -> None:
    from kvobs.allocator.report import MEANING

    reserved = device["reserved_bytes"] or 1
    print("\nWhere the reserved bytes are")
    print_table(("part", "size", "bytes", "share", "what it is"), [
        (name.replace("_", " "), size_text(value), f"{value:,}", f"{value / reserved:.1%}", MEANING[name])
        for name, value in ((name.removesuffix("_bytes"), value) for name, value in device["waste"].items())])
    if device["holders"]:
        print("\nWho holds them (kinds are estimated from stack frames)")
        print_table(("kind", "size", "bytes", "blocks", "share", "where"), [
            (one["kind"], size_text(one["bytes"]), f"{one['bytes']:,}", f"{one['blocks']:,}", f"{one['share']:.1%}",
             one["label"]) for one in device["holders"][:MOST_HOLDERS]])
        if further := device["holders"][MOST_HOLDERS:]:
            rest = device["other_holders"]
            say(f"and {len(further) + rest['holders']:,} more with "
                f"{size_text(sum(one['bytes'] for one in further) + rest['bytes'])}")
    if device["pins"]:
        print("\nWhat keeps free memory from being returned (the segments that hold back most)")
        print_table(("segment", "held back", "by", "where"), [
            (f"{pin['address']:#x}", size_text(pin["held_back_bytes"]),
             f"{pin['blocks']} block{'s' * (pin['blocks'] != 1)}, one of {size_text(pin['block_bytes'])}",
             pin["label"]) for pin in device["pins"][:MOST_PINS]])
    print("\nPublished definitions of fragmentation; none of them decides")
    print_table(("definition", "value", "formula"), [
        (f"{about['name']} ({about['owner']})", *_value(device["definitions"][about["name"]], about))
        for about in device["about_definitions"]])


def replay_text(replay: dict[str, Any]) -> str:
    """How far the replay agrees, in one line."""
    if not replay["usable"]:
        told = "Not replayed" if replay["engine"] == "none" else "Replayed, but nothing can be concluded from it"
        return f"{told}: {replay['reason']}."
    parts = [f"{replay[key]['matched']:,}/{replay[key]['checked']:,} {name}" for key, name in (
        ("addresses", "addresses"), ("device_allocs", "device allocations"), ("device_frees", "device frees"))]
    return (f"Replayed {replay['events']:,} events ({replay['engine']}): {', '.join(parts)} reproduced"
            + (f"; {replay['reason']}." if replay["reason"] else "."))


def _value(value: float | None, about: dict[str, Any]) -> tuple[str, str]:
    """The value and the formula, or why there is no value."""
    if value is None:
        return "none", f"{about['formula']}. {about['reason']}"
    return f"{value:,.0f} B" if about["unit"] == "By" else f"{value:.4f}", about["formula"]
