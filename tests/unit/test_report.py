"""The report's data and page; what a browser makes of it is in tests/integration/test_report_browser.py."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import os
import random
import re
import stat
from array import array
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from kvobs.allocator import recording as rec
from kvobs.allocator.explain import explain
from kvobs.allocator.holders import Attribution
from kvobs.allocator.readers import read
from kvobs.allocator.recorder import RecordingAllocator
from kvobs.allocator.recording import DeviceRecording, Events, Recording, Stacks
from kvobs.allocator.replay import replay
from kvobs.allocator.report import html, write_html
from kvobs.allocator.report._map import BLOCKS, GROUPS, Map, memory_map
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED, INACTIVE, PENDING
from tests.allocator_history import events_of, history
from tests.recordings import recorded

HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u2028&amp;.py"


def page(recording: Recording) -> str:
    told = explain(recording)
    return html(recording, told.replays, told.document)


def data(text: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return dict(json.loads(found))


def at(drawn: Map, moment: int) -> set[tuple[int, int]]:
    """Address and state of every block at a moment."""
    spans = drawn.blocks
    return {(spans.address[index], spans.state[index]) for index in range(len(spans))
            if spans.first[index] <= moment < spans.end[index]}


def reserved(drawn: Map, moment: int) -> set[int]:
    """The pages (of 512 bytes, numbered) that are reserved at a moment."""
    spans, found = drawn.segments, set()
    for index in range(len(spans)):
        if spans.first[index] <= moment < spans.end[index]:
            found.update(range(spans.address[index] // (2 * MIB), -(-(spans.address[index] + spans.size[index])
                                                                    // (2 * MIB))))
    return found


@pytest.mark.parametrize("expandable", [False, True])
@hypothesis.settings(max_examples=15)
@hypothesis.given(seed=st.integers(0, 10_000), kept=st.sampled_from([None, 60]))
def test_the_map_at_every_moment_is_what_was_live_then(expandable: bool, seed: int, kept: int | None) -> None:
    """Blocks and reserved memory at each moment are those of a second, slower account: the state before the first
    event, with every event applied anew; the last moment is the file's state.
    """
    made = history(seed, Settings(expandable_segments=expandable), 200 * MIB, 120, kept)
    replayed = replay(made.device, made.settings)
    drawn = memory_map(made.device, replayed, made.settings, Attribution(Stacks()), {7, 11})
    events = made.device.events
    assert drawn.moments[0] == -1
    assert drawn.moments[-1] == len(events) - 1
    for moment, event in enumerate(drawn.moments[:-1]):
        live = {block.address: block.state for segment in made.begin for block in segment.blocks
                if block.state != INACTIVE}
        pages = {page for segment in made.begin for page in range(segment.address // (2 * MIB),
                                                                  (segment.address + segment.size) // (2 * MIB))}
        for index in range(event + 1):
            address, action = events.address[index], events.action[index]
            touched = set(range(address // (2 * MIB), (address + events.size[index]) // (2 * MIB)))
            if action == rec.ALLOC:
                live[address] = ALLOCATED
            elif action == rec.FREE_REQUESTED:
                live[address] = PENDING
            elif action == rec.FREE_COMPLETED:
                live.pop(address, None)
            elif action in (rec.SEGMENT_ALLOC, rec.SEGMENT_MAP):
                pages |= touched
            elif action in (rec.SEGMENT_FREE, rec.SEGMENT_UNMAP):
                pages -= touched
        assert at(drawn, moment) == set(live.items())
        assert reserved(drawn, moment) == pages
    spans = drawn.blocks
    last = len(drawn.moments) - 1
    assert sorted((spans.address[index], spans.size[index], spans.state[index]) for index in range(len(spans))
                  if spans.first[index] <= last < spans.end[index]) == sorted(
        (block.address, block.size, block.state) for segment in made.device.state for block in segment.blocks
        if block.state != INACTIVE)


def test_the_map_is_bounded() -> None:
    """With more blocks than are drawn there are fewer moments, and the special ones stay, told as before."""
    made = history(1, Settings(), None, 2_000)
    replayed = replay(made.device, made.settings)
    whole, drawn = (memory_map(made.device, replayed, made.settings, Attribution(Stacks()), {123}, most_blocks=most)
                    for most in (BLOCKS, 500))
    assert len(drawn.blocks) <= 500 < len(whole.blocks)
    assert len(drawn.moments) < len(whole.moments)
    assert {-1, 123, len(made.device.events) - 1} <= set(drawn.moments)
    for moment, event in enumerate(drawn.moments):
        assert at(drawn, moment) == at(whole, whole.moments.index(event))


def without(device: DeviceRecording, actions: set[int]) -> DeviceRecording:
    """The same device with a history that lacks some kinds of events."""
    whole, events = device.events, Events()
    for name in Events.__slots__:
        getattr(events, name).extend(value for value, action in zip(getattr(whole, name), whole.action, strict=True)
                                     if action not in actions)
    return dataclasses.replace(device, events=events)


def test_an_unusable_replay_concludes_nothing() -> None:
    """Of a history that cannot be followed (no free was recorded) the page tells no peak, no growth and no trips to the
    device, like the document, and says why; with the frees it tells all three.
    """
    made = history(1, Settings(), None, 300)
    for actions, usable in ((set(), True), ({rec.FREE_REQUESTED, rec.FREE_COMPLETED}, False)):
        recording = Recording("made", "made", made.settings, (without(made.device, actions),))
        (device,) = data(page(recording))["devices"]
        assert [device["holders"]["peak"] is not None, device["peak_event"] is not None, bool(device["growth"]),
                bool(device["forced"])] == [usable] * 4
        assert device["score"].startswith("Replay not usable: ") is not usable


def test_frees_without_completions_are_not_pending_for_ever() -> None:
    """Where completions were not recorded (``skip_actions``), the map shows as pending after the last event only
    what the file's state shows so.
    """
    made = history(1, Settings(), None, 300)
    device = without(made.device, {rec.FREE_COMPLETED})
    for name in Events.__slots__:  # the last moment is the file's own state
        getattr(device.events, name).append(rec.OTHER if name == "action" else 0)
    drawn = memory_map(device, replay(device, made.settings), made.settings, Attribution(Stacks()), set())
    expected = {(block.address, block.state) for segment in device.state for block in segment.blocks
                if block.state != INACTIVE}
    assert PENDING in {state for _, state in expected}
    assert at(drawn, len(drawn.moments) - 2) == expected


def test_more_places_than_are_told_apart_are_others(tmp_path: Path) -> None:
    """With more places than the map names, a block is of its own place or of none, never of another's."""
    allocator = RecordingAllocator(now=itertools.count().__next__)
    expected = {}
    for line in range(1, GROUPS + 4):
        expected[allocator.alloc(512, frames=[("app/serve.py", line, "hold")])] = f"serve.py:{line} hold"
    allocator.dump(tmp_path / "made.pickle")
    (device,) = data(page(read(tmp_path / "made.pickle")))["devices"]
    drawn, ranges = device["map"], device["map"]["ranges"]
    places, groups, ends = (column(kind, drawn["blocks"][name]) for kind, name in (
        ("d", "at"), ("H", "group"), ("H", "end")))
    told = {}
    for position, group, end in zip(places, groups, ends, strict=True):
        if end == len(drawn["moments"]):
            address, _, begin = max((one for one in ranges if one[2] <= position), key=lambda one: one[2])
            told[int(address, 16) + int(position) - begin] = int(group)
    assert told.keys() == expected.keys()
    named = {address: drawn["groups"][group][0] for address, group in told.items() if group < len(drawn["groups"])}
    assert named.items() <= expected.items()
    assert len(named) == GROUPS


def test_the_pages_columns_are_the_files(tmp_path: Path) -> None:
    """What is embedded says the file's own state: the blocks of the last moment sum to its blocks in use, the classes
    of waste to its reserved bytes, and the line's last value is the reserved bytes after the last event; OOMs and times
    are those of the events.
    """
    recording = recorded(tmp_path / "made.pickle")
    (device,) = data(page(recording))["devices"]
    state = recording.devices[0].state
    blocks = {name: column(kind, device["map"]["blocks"][name]) for name, kind in
              (("size", "d"), ("first", "H"), ("end", "H"))}
    last = len(device["map"]["moments"]) - 1
    assert sum(size for size, first, end in zip(*blocks.values(), strict=True) if first <= last < end) == sum(
        block.size for segment in state for block in segment.blocks if block.state != INACTIVE)
    assert sum(part[1] for part in device["waste"]["parts"]) == sum(segment.size for segment in state)
    for name in ("low", "high"):
        assert column("d", device["timeline"]["lines"]["reserved"][name])[-1] == sum(segment.size for segment in state)
    events = recording.devices[0].events
    assert device["timeline"]["ooms"] == [events.action.index(rec.OOM)]
    assert device["map"]["since_us"] == [
        None if event < 0 else events.time_us[event] - events.time_us[0] for event in device["map"]["moments"]]
    assert device["score"] == "Replay: 8/8 addresses, 3/3 device allocations, 1/1 device frees reproduced."
    assert [(oom["verdict"], oom["requested"], oom["asker"]) for oom in device["ooms"]] == [
        ("CAPACITY", 256 * MIB, "linear.py:134 forward (from serve.py:20 answer) (activation)")]


def column(kind: str, encoded: str) -> list[float]:
    found = array(kind)
    found.frombytes(base64.b64decode(encoded))
    return list(found)


def test_names_of_the_file_stay_data(tmp_path: Path) -> None:
    """A frame called like the end of a script stays inside the data, and reads back as it was (on one line)."""
    text = page(recorded(tmp_path / "made.pickle", function=HOSTILE))
    assert text.count("<script") == 2
    assert "<img" not in text
    labels = [row[0] for row in data(text)["devices"][0]["holders"]["last"]["top"]]
    assert any(" ".join(HOSTILE.split()) in label for label in labels)


def test_the_policy_names_the_script_and_the_style(tmp_path: Path) -> None:
    """Nothing but the two parts that came with the page may run, each known by its hash; nothing may be loaded."""
    text = page(recorded(tmp_path / "made.pickle"))
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)

    def known(part: str) -> str:
        return base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()

    assert policy == (f"default-src 'none'; script-src 'sha256-{known(script)}'; style-src 'sha256-{known(style)}'; "
                      "base-uri 'none'; form-action 'none'")
    around = text.partition('id="data"')[0] + script
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg|http-equiv", "", around)


def test_writing_replaces_the_whole_file(tmp_path: Path) -> None:
    """The file is there as a whole with usual permissions and nothing beside it; else nothing is left."""
    recording = recorded(tmp_path / "made.pickle")
    told = explain(recording)
    target = tmp_path / "out" / "report.html"
    with pytest.raises(FileNotFoundError):
        write_html(recording, told.replays, told.document, target)
    target.parent.mkdir()
    plain = tmp_path / "plain"
    plain.touch()
    target.write_text("old")
    write_html(recording, told.replays, told.document, target)
    assert target.read_text(encoding="utf-8").endswith("</html>\n")
    assert list(target.parent.iterdir()) == [target]
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


@pytest.mark.slow
def test_a_million_events_fit(tmp_path: Path) -> None:
    """The report of a million events with 2,000 live blocks and 500 stacks stays below 8 MB."""
    chance = random.Random(5)
    allocator = RecordingAllocator(now=itertools.count().__next__)
    live = []
    while len(allocator.history) < 1_000_000:
        if len(live) < 2_000:
            stack = chance.randrange(500)
            live.append(allocator.alloc(512 * chance.randrange(1, 8_000), frames=[
                (f"app/module{stack}.py", stack, "forward_of_a_long_name" * 3)]))
        else:
            place = chance.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            allocator.free(live.pop())
    events = events_of(allocator.history)
    for index, entry in enumerate(allocator.history):
        events.stack[index] = entry["frames"][0]["line"] if entry["frames"] else -1
    frames = tuple((f"app/module{stack}.py", stack, "forward_of_a_long_name" * 3) for stack in range(500))
    recording = Recording("big", "made", Settings(), (DeviceRecording(0, allocator.snapshot(), events),),
                          stacks=Stacks(frames, tuple((stack,) for stack in range(500))))
    text = page(recording)
    assert 1_000_000 < len(text) < 8_000_000


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """A report to a FIFO (as to a device) or to a directory is refused and changes nothing; a link keeps its place."""
    recording = recorded(tmp_path / "made.pickle")
    told = explain(recording)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "target.html").write_text("before")
    (tmp_path / "link.html").symlink_to("target.html")
    before = sorted(tmp_path.iterdir())
    for place in (tmp_path / "fifo", tmp_path, Path(tmp_path.root)):
        with pytest.raises(OSError, match="is no regular file"):
            write_html(recording, told.replays, told.document, place)
    assert stat.S_ISFIFO((tmp_path / "fifo").lstat().st_mode)
    write_html(recording, told.replays, told.document, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "target.html").read_text().startswith("<!DOCTYPE html>")
    assert sorted(tmp_path.iterdir()) == before


def test_a_name_as_long_as_names_may_be_is_written(tmp_path: Path) -> None:
    """The unfinished file beside the report needs no longer name than the report's own."""
    recording = recorded(tmp_path / "made.pickle")
    told = explain(recording)
    place = tmp_path / ("a" * 250 + ".html")
    write_html(recording, told.replays, told.document, place)
    assert place.read_text().startswith("<!DOCTYPE html>")
