"""How a KV cache grows: sizes, copies and peaks against closed forms."""

from __future__ import annotations

import pytest

from kvobs.allocator import program as ops
from kvobs.allocator.core import run
from kvobs.allocator.growth import Growth, copied_bytes, kv_program, parse, plan, tail_bytes
from kvobs.allocator.settings import MIN_BLOCK, Settings

CAT, STATIC = Growth("cat"), Growth("static")
STEPS = 37


@pytest.mark.parametrize("text", ["cat", "static", "chunked:64", "paged:16"])
def test_ways_to_grow_are_read_as_they_are_written(text: str) -> None:
    """Parsing and writing a way to grow are inverse."""
    assert str(parse(text)) == text


@pytest.mark.parametrize("text", ["", "cats", "cat:1", "static:", "chunked", "chunked:0", "paged:-1", "paged:x",
                                  "paged:1048577", "chunked:1:2"])
def test_other_words_are_refused_with_what_is_allowed(text: str) -> None:
    """What is no way to grow is refused, and the refusal names all four."""
    with pytest.raises(ValueError, match=r"cat, static, chunked:N and paged:N"):
        parse(text)


@pytest.mark.parametrize("steps", [1, 2, STEPS])
def test_cat_allocates_and_copies_a_triangle(steps: int) -> None:
    """One token per step: cat allocates b T(T+1)/2 bytes and copies b T(T-1)/2."""
    lengths = list(range(1, steps + 1))
    assert sum(map(sum, plan(CAT, lengths, 96))) == 96 * steps * (steps + 1) // 2
    assert copied_bytes(CAT, lengths, 96) == 96 * steps * (steps - 1) // 2
    assert tail_bytes(CAT, lengths, 96) == 0


@pytest.mark.parametrize("chunk", [1, 5, 37, 64])
def test_chunks_allocate_and_copy_a_triangle_of_chunks(chunk: int) -> None:
    """With k = ceil(T/N) chunks of N tokens, b N k(k+1)/2 bytes are allocated and b N k(k-1)/2 copied."""
    lengths, chunks = list(range(1, STEPS + 1)), -(-STEPS // chunk)
    way = Growth("chunked", chunk)
    steps = plan(way, lengths, 96)
    assert len([step for step in steps if step]) == chunks
    assert sum(map(sum, steps)) == 96 * chunk * chunks * (chunks + 1) // 2
    assert copied_bytes(way, lengths, 96) == 96 * chunk * chunks * (chunks - 1) // 2
    assert tail_bytes(way, lengths, 96) == 96 * (chunk * chunks - STEPS)


@pytest.mark.parametrize("block", [1, 5, 16, 64])
def test_pages_copy_nothing_and_waste_less_than_a_block(block: int) -> None:
    """A paged cache has ceil(T/N) blocks, copies nothing, and wastes at most N-1 tokens at its end."""
    for length in range(1, STEPS):
        lengths = [7, 7 + length]
        way = Growth("paged", block)
        sizes = [size for step in plan(way, lengths, 96) for size in step]
        assert sizes == [96 * block] * -(-lengths[-1] // block)
        assert copied_bytes(way, lengths, 96) == 0
        assert 0 <= tail_bytes(way, lengths, 96) <= 96 * (block - 1)


def test_static_takes_the_whole_length_at_once() -> None:
    """A static cache is one allocation of the largest length, and nothing is copied."""
    assert plan(STATIC, [3, 9, 5], 10) == [(90,), (), ()]
    assert copied_bytes(STATIC, [3, 9, 5], 10) == 0
    assert tail_bytes(STATIC, [3, 9, 5], 10) == 40


@pytest.mark.parametrize("layers", [1, 3])
def test_the_peak_of_cat_holds_one_tensor_twice(layers: int) -> None:
    """At the last step all 2L tensors have T tokens and the last old one T-1: the peak is (2L T + T - 1) tokens."""
    token = 2 * MIN_BLOCK  # K and V of one token and layer are one block each
    program = kv_program(layers, token, [(10, STEPS - 10)], CAT)
    stats = run(program, Settings(), None, "Python").stats
    assert stats.peak_allocated == MIN_BLOCK * (2 * layers * STEPS + STEPS - 1)
    assert (stats.allocated, stats.ooms) == (0, 0)


def test_sessions_take_turns_and_give_everything_back() -> None:
    """Three paged sessions hold three times the blocks of one at the end, and free each of them exactly once."""
    program = kv_program(2, 64, [(5, 3), (4, 0)], Growth("paged", 4), sessions=3)
    allocated = [handle for op, handle in zip(program.op, program.handle, strict=True) if op == ops.ALLOC]
    freed = [handle for op, handle in zip(program.op, program.handle, strict=True) if op == ops.FREE]
    assert len(allocated) == 3 * 4 * 3  # sessions, tensors, ceil(12 / 4) blocks
    assert sorted(freed) == allocated == list(range(len(allocated)))
    assert {program.size[index] for index, op in enumerate(program.op) if op == ops.ALLOC} == {4 * 32}


@pytest.mark.parametrize(("layers", "token", "turns", "sessions"), [
    (0, 64, [(1, 1)], 1), (1, 63, [(1, 1)], 1), (1, 0, [(1, 1)], 1), (1, 64, [], 1), (1, 64, [(0, 0)], 1),
    (1, 64, [(-1, 2)], 1), (1, 64, [(1, 1)], 0)])
def test_conversations_that_cannot_be_are_refused(layers: int, token: int, turns: list[tuple[int, int]],
                                                  sessions: int) -> None:
    """A cache without layers, tokens, turns or sessions is refused rather than empty."""
    with pytest.raises(ValueError, match=r"KV cache|turn"):
        kv_program(layers, token, turns, CAT, sessions)
