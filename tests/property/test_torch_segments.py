"""The summary of a snapshot: bounded, valid, and equal to a count of its own; settings strings are read back."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvobs.sources._torch_segments import summary
from kvobs.sources._torch_stats import settings
from tests.fake_torch import segment

STATES = st.sampled_from(["active_allocated", "active_pending_free", "active_awaiting_free", "inactive"])
BLOCKS = st.lists(st.tuples(st.integers(1, 1 << 44), STATES), min_size=1, max_size=20)
SEGMENTS = st.lists(
    st.builds(lambda blocks, device, stream, pool, kind, expandable: segment(
        *blocks, device=device, stream=stream, pool=pool, kind=kind, expandable=expandable),
        BLOCKS, st.integers(0, 3), st.integers(0, 1 << 48), st.tuples(st.integers(0, 2), st.integers(0, 2)),
        st.sampled_from(["small", "large"]), st.booleans()), max_size=40)


def counted(segments: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Every figure again, by collecting blocks into lists first."""
    blocks: dict[tuple[Any, ...], list[tuple[int, str]]] = defaultdict(list)
    kinds: dict[tuple[Any, ...], list[bool]] = defaultdict(list)
    for found in segments:
        who = (found["device"], found["stream"], tuple(found["segment_pool_id"]), found["segment_type"])
        blocks[who] += [(block["size"], block["state"]) for block in found["blocks"]]
        kinds[who].append(found["is_expandable"])
    told = {}
    for who, found_blocks in blocks.items():
        free = sorted((size for size, state in found_blocks if state == "inactive"), reverse=True)
        told[who] = {
            "segments": len(kinds[who]), "reserved": sum(size for size, _ in found_blocks),
            "allocated": sum(size for size, state in found_blocks if state == "active_allocated"),
            "active_pending": sum(size for size, state in found_blocks if "pending" in state or "awaiting" in state),
            "free": sum(free), "largest_free": free[:10],
            "free_histogram": [[1 << k, len(sizes), sum(sizes)] for k in range(64)
                               if (sizes := [size for size in free if 1 << k <= size < 1 << (k + 1)])],
            "expandable": kinds[who][0] if len(set(kinds[who])) == 1 else "some",
        }
    return told


@given(SEGMENTS)
def test_a_summary_equals_a_count_of_its_own(segments: list[dict[str, Any]]) -> None:
    """Every group has exactly the counted figures, none is left out, and the totals are the groups' sums."""
    told = json.loads(summary(segments, 10_000_000))
    expected = counted(segments)
    groups = {(group.pop("device"), group.pop("stream"), tuple(group.pop("pool")), group.pop("type")): group
              for group in told["groups"]}
    assert groups == expected
    assert told["omitted"] == 0
    for name, total in told["totals"].items():
        assert total == sum(group[name] for group in expected.values())
    totals = told["totals"]
    assert totals["allocated"] + totals["active_pending"] + totals["free"] == totals["reserved"]


@given(SEGMENTS, st.integers(1_000, 5_000))
def test_a_summary_keeps_its_bound_and_stays_json(segments: list[dict[str, Any]], limit: int) -> None:
    """Whatever the limit, the text fits, parses, keeps the largest groups and true totals, and counts the omitted."""
    text = summary(segments, limit)
    assert text.isascii()
    assert len(text) <= limit
    told, whole = json.loads(text), json.loads(summary(segments, 10_000_000))
    assert told["totals"] == whole["totals"]
    assert told["groups"] == whole["groups"][:len(told["groups"])]
    assert told["omitted"] == len(whole["groups"]) - len(told["groups"])
    reserved = [group["reserved"] for group in whole["groups"]]
    assert reserved == sorted(reserved, reverse=True)
    if told["omitted"]:
        following = len(json.dumps(whole["groups"][len(told["groups"])], separators=(",", ":")))
        assert len(text) + following + 1 > limit - 4  # nothing was left out that had room (a digit or so apart)


def test_a_limit_below_the_least_is_refused() -> None:
    """A limit that could not hold the totals is an error of the caller."""
    with pytest.raises(ValueError, match="at least 1000"):
        summary([], 999)


def test_what_an_older_snapshot_does_not_say_is_null() -> None:
    """A snapshot without pools and expandability, as torch 2.0 made them, has null there and true sums."""
    old = segment((512, "active_allocated"), (1536, "inactive"))
    del old["segment_pool_id"], old["is_expandable"]
    group, = json.loads(summary([old]))["groups"]
    assert (group["pool"], group["expandable"], group["free"]) == (None, None, 1536)


NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20)
PLAIN = st.text("abcTrueFals0123456789.", min_size=1, max_size=20)
LISTS = st.lists(st.tuples(st.sampled_from(["256", "512", ">"]), st.integers(1, 16)), min_size=1, max_size=4).map(
    lambda pairs: "[" + ",".join(f"{size}:{parts}" for size, parts in pairs) + "]")


@given(st.dictionaries(NAMES, PLAIN | LISTS, max_size=20), st.sampled_from(["", " "]))
def test_settings_are_read_back(pairs: dict[str, str], space: str) -> None:
    """A string built from pairs, spaced or not, lists in brackets included, gives those pairs in their order."""
    text = f"{space},{space}".join(f"{key}{space}:{space}{value}" for key, value in pairs.items())
    assert settings(text) == tuple(pairs.items())


@given(st.text())
def test_any_text_gives_bounded_settings(text: str) -> None:
    """Whatever stands in the environment, there are at most 32 pairs of bounded, non-empty words and no exception."""
    found = settings(text)
    assert len(found) <= 32
    assert all(0 < len(word) <= 64 for pair in found for word in pair)


def test_the_last_of_equal_keys_counts() -> None:
    """torch applies a settings string from left to right."""
    assert settings("a:1,b:2,a:3") == (("b", "2"), ("a", "3"))
