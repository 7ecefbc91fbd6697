"""Allocator settings: PyTorch's own values and refusals, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.allocator.core import run
from kvobs.allocator.program import ALLOC, Program
from kvobs.allocator.settings import MIB, NO_DIVISIONS, Settings, from_snapshot, next_division, parse

# The configuration of PyTorch's own test of the parser (c10/test/core/AllocatorConfig_test.cpp), and what it expects.
PYTORCHS = ("max_split_size_mb:40,max_non_split_rounding_mb:30,garbage_collection_threshold:0.5,"
            "roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1],expandable_segments:True")
EXPECTED = {32: 8, 64: 8, 128: 2, 256: 4, 512: 2, 1024: 4, 2048: 1, 4096: 1, 8192: 1}


def test_pytorchs_own_example() -> None:
    """Every value that PyTorch's test expects of this string comes out."""
    found = parse(PYTORCHS)
    assert (found.max_split_size, found.max_non_split_rounding) == (40 * MIB, 30 * MIB)
    assert (found.garbage_collection_threshold, found.expandable_segments) == (0.5, True)
    for mebibytes, divisions in EXPECTED.items():
        assert found.roundup_power2_divisions[mebibytes.bit_length() - 1] == divisions
        rounded = found.round_size(mebibytes * MIB + 1)
        assert rounded == mebibytes * MIB + (mebibytes * MIB // divisions if divisions > 1 else 512)


@pytest.mark.parametrize(("size", "conf", "rounded"), [
    (1, "", 512), (512, "", 512), (513, "", 1024), (MIB, "", MIB), (MIB + 1, "", MIB + 512),
    # Between 1024 and 2048 in four divisions lie 1280, 1536 and 1792; but the allocator divides only what is larger
    # than 512 B x divisions.
    (1_200, "roundup_power2_divisions:4", 1_536), (2_049, "roundup_power2_divisions:4", 2_560),
    (5 * MIB, "roundup_power2_divisions:4", 5 * MIB), (5 * MIB + 1, "roundup_power2_divisions:4", 6 * MIB),
    (5 * MIB, "roundup_power2_divisions:1", 5 * MIB), (4 * MIB, "roundup_power2_divisions:8", 4 * MIB)])
def test_rounding(size: int, conf: str, rounded: int) -> None:
    """Requests become blocks as the source's comments and code say."""
    assert parse(conf).round_size(size) == rounded


@pytest.mark.parametrize(("conf", "large", "split", "rounding"), [
    ("large_segment_size_mb:12", 12, None, 12), ("large_segment_size_mb:12,max_split_size_mb:12", 12, 12, 12),
    ("max_non_split_rounding_mb:50,large_segment_size_mb:40", 40, None, 50), ("max_split_size_mb:20", 20, 20, 20)])
def test_the_size_of_large_segments_bounds_others(conf: str, large: int, split: int | None, rounding: int) -> None:
    """As torch 2.13 told when it was given these: the rounding follows it, and a limit may be as small as it is."""
    found = parse(conf)
    assert (found.large_segment_size, found.max_split_size, found.max_non_split_rounding) == (
        large * MIB, None if split is None else split * MIB, rounding * MIB)
    assert parse(found.conf()) == found


def test_the_documented_division() -> None:
    """The example of PyTorch's documentation: 1,200 bytes with four divisions give 1,280."""
    assert next_division(1_200, 4) == 1_280


@pytest.mark.parametrize(("rounded", "segment"), [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB),
                                                  (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
                                                  (10 * MIB + 512, 12 * MIB), (21 * MIB, 22 * MIB)])
def test_segments(rounded: int, segment: int) -> None:
    """What the device is asked for: 2 MiB, 20 MiB, or the size itself in steps of 2 MiB."""
    assert Settings().segment_size(rounded) == segment


@pytest.mark.parametrize(("conf", "words"), [
    ("max_split_size_mb:10", "11 or more"), ("max_split_size_mb:19", "20 .the size of large segments"),
    ("max_split_size_mb:30,large_segment_size_mb:40", "40 .the size of large segments"),
    ("large_segment_size_mb:40,max_non_split_rounding_mb:30", "40 .the size of large segments"),
    ("large_segment_size_mb:10", "11 or more"), ("garbage_collection_threshold:1.0", "between 0 and 1"),
    ("garbage_collection_threshold:nan", "between 0 and 1"), ("expandable_segments:yes", "True or False"),
    ("roundup_power2_divisions:3", "power of two"), ("roundup_power2_divisions:[3:4]", "power of two"),
    ("roundup_power2_divisions:[64]", "power of two"), ("expandable", "option:value"), ("no_such:1", "no option")])
def test_refusals(conf: str, words: str) -> None:
    """What PyTorch refuses is refused here, and says what is allowed."""
    with pytest.raises(ValueError, match=words):
        parse(conf)


@given(divisions=st.lists(st.sampled_from([0, 1, 2, 4, 8, 16]), min_size=16, max_size=16),
       split=st.integers(21, 4_000), threshold=st.floats(0.01, 0.99), expandable=st.booleans(),
       fraction=st.none() | st.sampled_from([0.25, 0.9, 1.0]))
def test_what_is_written_is_read_again(divisions: list[int], split: int, threshold: float, expandable: bool,
                                       fraction: float | None) -> None:
    """The line for PYTORCH_ALLOC_CONF gives the same settings back; no divisions may come back as one."""
    written = Settings(split * MIB, roundup_power2_divisions=tuple(divisions), expandable_segments=expandable,
                       garbage_collection_threshold=round(threshold, 4), memory_fraction=fraction)
    found = parse(written.conf())
    assert [max(value, 1) for value in found.roundup_power2_divisions] == [max(value, 1) for value in divisions]
    assert replace(found, roundup_power2_divisions=written.roundup_power2_divisions) == written


def test_a_snapshots_settings() -> None:
    """The fields of a snapshot decide, whatever the line of the environment says; -1 is no limit."""
    told = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,unheard_of:1", "max_split_size": 200 * MIB,
            "garbage_collection_threshold": 0.8, "expandable_segments": True,
            "roundup_power2_divisions": {str(1 << index): 4 for index in range(16)}}
    assert from_snapshot(told) == Settings(200 * MIB, garbage_collection_threshold=0.8, expandable_segments=True,
                                           roundup_power2_divisions=(4,) * 16)
    assert from_snapshot({"max_split_size": -1}) == Settings()
    assert from_snapshot({}).roundup_power2_divisions == NO_DIVISIONS


@pytest.mark.parametrize("option", ["max_split_size_mb", "large_segment_size_mb", "max_non_split_rounding_mb"])
@pytest.mark.parametrize("told", ["17592186044416", "9" * 40])
def test_sizes_beyond_64_bits_are_merely_large(option: str, told: str) -> None:
    """A size of 2^64 bytes or more acts as one that no device has, alike in both engines (it does not wrap to 0)."""
    program = Program()
    for handle in range(30):
        program.add(ALLOC, handle, 3 * MIB)
    huge, large = (parse(f"{option}:{value}") for value in (told, "16777216"))
    assert huge == large
    figures = [run(program, huge, engine=engine).stats for engine in ("Python", "auto")]
    assert figures[0] == figures[1]
    assert figures[0].peak_allocated == 90 * MIB <= figures[0].peak_reserved


@pytest.mark.parametrize("told", [f"roundup_power2_divisions:{1 << 62}", "roundup_power2_divisions:" + "1" * 5000,
                                  "max_split_size_mb:" + "9" * 5000, "max_split_size_mb:\u0663\u0663"])
def test_numbers_that_no_allocator_uses_are_refused(told: str) -> None:
    """Powers whose products would not fit 64 bits, thousands of digits and other scripts' digits: one sentence."""
    with pytest.raises(ValueError, match=r"is not allowed|is no power of two up to"):
        parse(told)
