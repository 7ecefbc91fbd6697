"""torch's statistics and history on virtual devices, against an account written from PyTorch's source alone."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from kvobs.allocator.program import ADVANCE, ALLOC, EMPTY_CACHE, FREE, RECORD_STREAM, Program
from kvobs.allocator.recording import ACTIONS
from kvobs.allocator.settings import INTERVALS, MIB, Settings
from tests.programs import random_size
from tests.real_memory import Piece
from tests.real_stats import Counted
from tests.vgpu import needs_vgpu, on_vgpu
from tests.vgpu_player import packed

pytestmark = needs_vgpu()
DEVICES, LENGTH = 12, 500
OPERATIONS, WEIGHTS = (ALLOC, FREE, RECORD_STREAM, ADVANCE, EMPTY_CACHE), (500, 420, 60, 80, 4)
FIRST = 0x7F0000000000  # where the account begins


def random_program(draw: random.Random, length: int) -> Program:
    """Operations in the default pool, on several streams."""
    program, live, names = Program(), list[int](), 0
    while len(program) < length:
        op = draw.choices(OPERATIONS, WEIGHTS)[0]
        if op == ALLOC:
            program.add(ALLOC, names, max(1, random_size(draw)), draw.randrange(3))
            live.append(names)
            names += 1
        elif op == FREE and live:
            program.add(FREE, live.pop(draw.randrange(len(live))))
        elif op == RECORD_STREAM and live:
            program.add(RECORD_STREAM, draw.choice(live), stream=draw.randrange(4))
        elif op == ADVANCE:
            program.add(ADVANCE, stream=draw.randrange(4))
        elif op == EMPTY_CACHE:
            program.add(EMPTY_CACHE)
    return program


def accounted(program: Program, settings: Settings, capacity: int, reset_at: int) -> dict[str, Any]:
    """What ``measured`` tells, by the account. Statistics are begun anew in the middle, as there."""
    real = Counted(capacity, expandable=settings.expandable_segments, max_split=settings.max_split_size,
                   threshold=settings.garbage_collection_threshold, fraction=settings.memory_fraction,
                   divisions=settings.roundup_power2_divisions[0])
    live: dict[int, Piece | None] = {}
    middle: dict[str, int] = {}
    columns = zip(program.op, program.handle, program.size, program.stream, strict=True)
    for at, (op, handle, size, stream) in enumerate(columns):
        if at == reset_at:
            middle = real.flat()
            real.reset_peaks()
            real.reset_accumulated()
        piece = live.get(handle)
        if op == ALLOC:
            try:
                live[handle] = real.malloc(size, stream)
            except MemoryError:
                live[handle] = None
        elif op == FREE:
            del live[handle]
            if piece is not None:
                real.free(piece)
        elif op == RECORD_STREAM and piece is not None:
            real.record_stream(piece, stream)
        elif op == ADVANCE:
            real.reach(stream)
        elif op == EMPTY_CACHE:
            real.empty_cache()
    return {"middle": middle, "end": real.flat(),
            "history": [[ACTIONS[action], address - (0 if ACTIONS[action] == "oom" else FIRST), size, stream, pool]
                        for action, address, size, stream, pool in real.trace]}


def measured(programs: list[object], reset_at: int) -> object:
    import torch

    from kvobs.allocator.program import ADVANCE, ALLOC, EMPTY_CACHE, FREE, RECORD_STREAM
    from tests.vgpu_player import Player, conserved

    told = []
    torch.vgpu.memory._record_memory_history(context=None)
    for device, one in enumerate(programs):
        player, tensors = Player(device), {}
        player.set(one["settings"][0])
        torch.accelerator.reset_peak_memory_stats(device)
        torch.accelerator.reset_accumulated_memory_stats(device)
        faults, middle = [], {}
        columns = zip(one["op"], one["handle"], one["size"], one["stream"], strict=True)
        for at, (op, handle, size, stream) in enumerate(columns):
            if at == reset_at:
                middle = player.stats()
                torch.accelerator.reset_peak_memory_stats(device)
                torch.accelerator.reset_accumulated_memory_stats(device)
            if op == ALLOC:
                tensors[handle] = player.alloc(size, stream)
            elif op == FREE:
                del tensors[handle]
            elif op == RECORD_STREAM and tensors[handle] is not None:
                tensors[handle].record_stream(player.streams[stream])
            elif op == ADVANCE:
                player.reach(stream)
            elif op == EMPTY_CACHE:
                player.empty_cache()
            if at % 20 == 0:
                faults += conserved(player.stats(), torch.vgpu.memory_snapshot(), device)
        told.append({"middle": middle, "end": player.stats(), "faults": faults, "history": player.history()})
    return told


def ordered(history: list[list[Any]]) -> list[list[Any]]:
    """The history with what became free at one time sorted: in which order streams are asked is a hash map's choice."""
    runs = itertools.groupby(history, lambda event: event[0] == "free_completed")
    return [event for freed, run in runs for event in (sorted(run) if freed else run)]


def random_settings(draw: random.Random) -> Settings:
    """The options that the account knows."""
    divisions = draw.choice((0, 0, 4, 8))
    return Settings(
        max_split_size=draw.choice((None, None, 24 * MIB, 40 * MIB)), roundup_power2_divisions=(divisions,) * INTERVALS,
        garbage_collection_threshold=draw.choice((0.0, 0.3, 0.7)), expandable_segments=draw.random() < 0.4,
        memory_fraction=draw.choice((None, 0.5, 1.0)))


@pytest.mark.parametrize("batch", range(3))
def test_every_statistic_is_what_pytorch_would_count(batch: int) -> None:
    """Every statistic, peaks and sums among them, in the middle of a program, and at its end after they were begun
    anew; the whole history, event by event; and at any time the sums over the snapshot.
    """
    draw = random.Random(7_000 + batch)
    programs = [random_program(draw, LENGTH) for _ in range(DEVICES)]
    plans = [random_settings(draw) for _ in range(DEVICES)]
    capacities = [draw.choice((150, 300, 800, 3_000)) * MIB for _ in range(DEVICES)]
    found = on_vgpu(measured, devices=tuple(capacities), reset_at=LENGTH // 2,  # type: ignore[arg-type]
                    programs=[packed(*one) for one in zip(programs, plans, strict=True)])
    seen: dict[str, int] = {}
    for number, told in enumerate(found):
        wanted = accounted(programs[number], plans[number], capacities[number], LENGTH // 2)
        assert told["faults"] == []
        for when in ("middle", "end"):
            for name, value in wanted[when].items():
                assert told[when][name] == value, (number, when, name, plans[number])
                seen[name] = seen.get(name, 0) + value
            assert set(told[when]) - set(wanted[when]) == {"max_split_size"}
        assert ordered(told["history"]) == ordered(wanted["history"])
    assert all(seen.values()), [name for name, value in seen.items() if not value]  # no statistic stayed at 0
