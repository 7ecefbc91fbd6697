"""KV tensors found in a recorded demand, and made to grow otherwise."""

from __future__ import annotations

import pytest

from kvobs.allocator import program as ops
from kvobs.allocator.chains import NotDerivable, regrow
from kvobs.allocator.demand import RecordedDemand
from kvobs.allocator.growth import Growth, kv_program, parse
from kvobs.allocator.program import Program
from kvobs.allocator.recording import Stacks

CAT = Growth("cat")
# Two lines of a cache, and one of a layer.
STACKS = Stacks((("cache.py", 1, "update"), ("cache.py", 2, "update"), ("layer.py", 3, "forward")),
                ((0, 2), (1, 2), (2,)))
K_LINE, V_LINE, OTHER = 0, 1, 2


def is_kv(frames: tuple[tuple[str, int, str], ...]) -> bool:
    return frames[0][0] == "cache.py"


def recorded(program: Program, one_line: bool = False) -> RecordedDemand:
    """A cat program as a demand: its handles alternate between K and V."""
    handles = sum(op == ops.ALLOC for op in program.op)
    demand = RecordedDemand(program, history=True)
    demand.event.extend(range(len(program)))
    demand.stack.extend(K_LINE if one_line else (K_LINE, V_LINE)[handle % 2] for handle in range(handles))
    return demand


def columns(program: Program) -> list[tuple[int, ...]]:
    return list(zip(program.op, program.handle, program.size, program.stream, program.pool, strict=True))


@pytest.mark.parametrize("way", ["cat", "static", "chunked:4", "chunked:64", "paged:1", "paged:8"])
@pytest.mark.parametrize("one_line", [False, True])
@pytest.mark.parametrize("sessions", [1, 2])
def test_a_recorded_cat_regrown_is_what_would_have_been_generated(way: str, one_line: bool, sessions: int) -> None:
    """Regrowing a cat cache from its sizes alone gives the very program that the generator makes of its lengths."""
    turns = [(7, 5), (3, 6)]
    demand = recorded(kv_program(3, 1024, turns, CAT, sessions), one_line)
    made, regrown = regrow(demand, parse(way), STACKS, is_kv)
    assert columns(made.program) == columns(kv_program(3, 1024, turns, parse(way), sessions))
    assert (regrown.chains, regrown.token_bytes, regrown.left) == (6 * sessions, (512,), 0)
    lengths = [7, 8, 9, 10, 11, 12, 15, 16, 17, 18, 19, 20]
    assert regrown.copied_bytes_before == 6 * sessions * 512 * sum(lengths)


def test_what_is_not_kv_stays_where_it_was() -> None:
    """Every other operation keeps its place among the rest, its size, stream and pool."""
    demand = RecordedDemand(history=True)
    demand.allocate(0, 100, 5, 1, OTHER)
    demand.allocate(1, 512, 0, 0, K_LINE)
    demand.add(2, ops.RECORD_STREAM, 0, stream=-1)
    demand.add(2, ops.FREE, 0)
    demand.allocate(3, 1024, 0, 0, K_LINE)
    demand.add(4, ops.FREE, 1)
    demand.add(5, ops.ADVANCE, stream=-1)
    demand.add(6, ops.EMPTY_CACHE)
    made, _ = regrow(demand, Growth("paged", 1), STACKS, is_kv)
    assert columns(made.program) == [
        (ops.ALLOC, 0, 100, 5, 1), (ops.ALLOC, 1, 512, 0, 0), (ops.RECORD_STREAM, 0, 0, -1, 0), (ops.FREE, 0, 0, 0, 0),
        (ops.ALLOC, 2, 512, 0, 0), (ops.ADVANCE, 0, 0, -1, 0), (ops.EMPTY_CACHE, 0, 0, 0, 0)]
    assert list(made.event) == [0, 1, 2, 2, 3, 5, 6]
    assert list(made.stack) == [OTHER, K_LINE, K_LINE]


def test_a_failed_growth_is_asked_as_the_other_way_would() -> None:
    """Where cat failed to grow from 3 to 4 tokens, blocks of 4 ask for nothing, blocks of 3 for one more, which the
    failure gives back, and the tensor before stays alive.
    """
    def failing() -> RecordedDemand:
        demand = RecordedDemand(history=True)
        for tokens in (2, 3):
            demand.allocate(tokens, 512 * tokens, 0, 0, K_LINE)
        demand.add(3, ops.FREE, 0)
        demand.failed.append(len(demand.program))
        demand.allocate(4, 512 * 4, 0, 0, K_LINE)
        demand.add(4, ops.FREE, 2)
        return demand

    fours, _ = regrow(failing(), Growth("paged", 4), STACKS, is_kv)
    assert columns(fours.program) == [(ops.ALLOC, 0, 2048, 0, 0)]
    assert fours.failed == []
    threes, _ = regrow(failing(), Growth("paged", 3), STACKS, is_kv)
    assert columns(threes.program) == [(ops.ALLOC, 0, 1536, 0, 0), (ops.ALLOC, 1, 1536, 0, 0), (ops.FREE, 1, 0, 0, 0)]
    assert threes.failed == [1]
    cat, _ = regrow(failing(), CAT, STACKS, is_kv)
    assert columns(cat.program) == columns(failing().program)
    static, _ = regrow(failing(), Growth("static"), STACKS, is_kv)
    assert columns(static.program) == [(ops.ALLOC, 0, 2048, 0, 0)]


@pytest.mark.parametrize(("sizes", "said"), [
    ([], "recognised as KV"), ([512, 512], "grows by whole tokens"), ([1000, 1700], "grows by whole tokens")])
def test_what_does_not_grow_by_tokens_is_refused_in_a_sentence(sizes: list[int], said: str) -> None:
    """Without KV frames, without growth, or with sizes that are no multiple of the growth, nothing is invented."""
    demand = RecordedDemand(history=True)
    demand.allocate(0, 4096, 0, 0, OTHER)
    for index, size in enumerate(sizes, start=1):
        demand.allocate(index, size, 0, 0, K_LINE)
        if index > 1:
            demand.add(index, ops.FREE, index - 1)
    with pytest.raises(NotDerivable, match=said) as refused:
        regrow(demand, CAT, STACKS, is_kv)
    assert str(refused.value).endswith(".")


def test_a_new_conversation_is_not_taken_for_growth() -> None:
    """A tensor freed long after larger ones of another conversation were made ends; it did not grow into one."""
    demand = RecordedDemand(history=True)
    for tokens in (1, 2):
        demand.allocate(tokens, 512 * tokens, 0, 0, K_LINE)
    demand.add(2, ops.FREE, 0)
    for tokens in (9, 10, 11):  # three other tensors of the same line: more than K and V of one step
        demand.allocate(tokens, 512 * tokens, 0, 0, K_LINE)
    demand.allocate(3, 512 * 3, 0, 0, K_LINE)
    demand.add(3, ops.FREE, 1)
    made, regrown = regrow(demand, Growth("paged", 3), STACKS, is_kv)
    assert (regrown.chains, regrown.left) == (1, 3)
    assert [made.program.size[index] for index, op in enumerate(made.program.op) if op == ops.ALLOC] == [
        1536, 512 * 9, 512 * 10, 512 * 11]
