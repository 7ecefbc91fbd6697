"""Events to rows and back. Pure; the wall clock comes in as a function of monotonic nanoseconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvobs import model

SECOND_NS = 1_000_000_000
TEXT_LIMIT = 4096  # characters of a free text that are kept: a message or an id must not fill the store
FLIGHT_LIMIT = 65_536  # characters of a flight record's JSON: a longer one is left out as a whole
WallClock = Callable[[int], int]
Row = tuple[Any, ...]


def clip(text: str) -> str:
    """The text, at most ``TEXT_LIMIT`` characters of it."""
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT]


def second(wall_ns: int) -> int:
    """The beginning of the second that ``wall_ns`` lies in."""
    return wall_ns - wall_ns % SECOND_NS


def origin_row(origin: model.Origin | None) -> Row:
    """An origin's five columns."""
    if origin is None:
        return (None,) * 5
    return (origin.source, origin.model, origin.cache, origin.device, origin.dtype)


def turn_row(turn: model.Turn, wall: WallClock) -> Row:
    """All fields of a turn; ``wall_ns`` is its end."""
    return (wall(turn.t_ns), turn.t_ns, turn.start_ns, turn.wall_start_ns, *origin_row(turn.origin), turn.cache_id,
            clip(turn.session), turn.priority, turn.turn, turn.outcome, turn.steps, turn.prompt_tokens,
            turn.cached_tokens, turn.new_tokens, turn.kv_bytes, turn.kv_reserved_bytes, turn.kv_largest_bytes,
            turn.reallocations, turn.bytes_written, turn.bytes_copied, json.dumps(turn.migrations),
            turn.ttft_ns, turn.tpot_ns, turn.prefill_ns, turn.hook_ns, turn.trace_id, turn.span_id, int(turn.sampled))


def turn_of(row: Sequence[Any]) -> model.Turn:
    """The turn of a row of the table ``turns``."""
    moves = tuple((src, dst, buffers, size) for src, dst, buffers, size in json.loads(row[24]))
    fields = (*row[1:4], model.Origin(*row[4:9]), *row[9:24], moves, *row[25:31], bool(row[31]))
    return model.Turn(*fields)


def migration_row(move: model.Migration, wall: WallClock) -> Row:
    """All fields of a migration."""
    return (wall(move.t_ns), move.t_ns, *origin_row(move.origin), move.cache_id, move.src, move.dst, move.buffers,
            move.bytes, move.duration_ns)


def migration_of(row: Sequence[Any]) -> model.Migration:
    """The migration of a row of the table ``migrations``."""
    return model.Migration(row[1], model.Origin(*row[2:7]), *row[7:13])


def event_row(event: model.OutOfMemory | model.HookFailed | model.CacheGone, wall: WallClock) -> Row:
    """A rare fact as a row of the table ``events``; columns that do not apply are absent."""
    at = (wall(event.t_ns), event.t_ns)
    if isinstance(event, model.OutOfMemory):
        return (*at, "out_of_memory", *origin_row(event.origin), None, clip(event.session), None, clip(event.message))
    if isinstance(event, model.HookFailed):
        return (*at, "hook_failed", event.source, *(None,) * 6, clip(event.hook), clip(event.error))
    return (*at, "cache_gone", *(None,) * 5, event.cache_id, None, None, None)


def event_of(row: Sequence[Any]) -> model.OutOfMemory | model.HookFailed | model.CacheGone:
    """The event of a row of the table ``events``."""
    _, t_ns, kind, source, *_, cache_id, session, hook, message = row
    if kind == "out_of_memory":
        return model.OutOfMemory(t_ns, None if source is None else model.Origin(*row[3:8]), session, message)
    if kind == "hook_failed":
        return model.HookFailed(t_ns, source, hook, message)
    return model.CacheGone(t_ns, cache_id)


def blocks_row(pool: model.Blocks, wall: WallClock) -> Row:
    """A pool's state; the last one of a second is kept."""
    return (second(wall(pool.t_ns)), pool.cache_id, pool.t_ns, *origin_row(pool.origin), pool.block_bytes, pool.used,
            pool.cached, pool.free, pool.allocations, pool.failures, pool.preemptions)


def blocks_of(row: Sequence[Any]) -> model.Blocks:
    """The pool state of a row of the table ``blocks``."""
    return model.Blocks(row[2], model.Origin(*row[3:8]), row[1], *row[8:15])


def step_row(step: model.Step, wall: WallClock) -> Row:
    """One step as a row of sums that merges with the others of its second and cache."""
    prefill = int(step.prefill)
    return (second(wall(step.t_ns)), step.cache_id, step.t_ns, *origin_row(step.origin), 1, prefill, step.tokens,
            step.tokens * prefill, step.duration_ns, step.hook_ns, step.kv_bytes, step.kv_reserved_bytes,
            step.kv_largest_bytes, step.reallocations, step.bytes_written, step.bytes_copied)


def rewrite_row(rewrite: model.Rewrite, wall: WallClock) -> Row:
    """Buffers rearranged between steps, as a row that merges with the steps of its second; it knows no sizes."""
    return (second(wall(rewrite.t_ns)), rewrite.cache_id, rewrite.t_ns, *origin_row(rewrite.origin), 0, 0, 0, 0, 0, 0,
            None, None, None, rewrite.reallocations, 0, rewrite.bytes_copied)


def resized_row(sizes: model.Resized, wall: WallClock) -> Row:
    """What a cache holds after a change between steps, as a row that merges with the steps of its second."""
    return (second(wall(sizes.t_ns)), sizes.cache_id, sizes.t_ns, *origin_row(sizes.origin), 0, 0, 0, 0, 0, 0,
            sizes.kv_bytes, sizes.kv_reserved_bytes, sizes.kv_largest_bytes, 0, 0, 0)


def allocator_row(event: model.Allocation | model.AllocatorState, wall: WallClock) -> Row:
    """A request to, or the state of, an allocator as a row that merges with the others of its second."""
    at = (second(wall(event.t_ns)), event.device, event.t_ns)
    if isinstance(event, model.Allocation):
        return (*at, 1, event.bytes, event.latency_ns, event.latency_ns, None, None, None)
    return (*at, 0, 0, 0, 0, event.reserved_bytes, event.allocated_bytes, event.largest_free_bytes)


def attention_row(sample: model.Attention, wall: WallClock) -> Row:
    """A sampled decode step as a row of sums that merges with the others of its second, cache and kind."""
    return (second(wall(sample.t_ns)), sample.cache_id, sample.layers, sample.t_ns, *origin_row(sample.origin),
            clip(sample.session), sample.turn, sample.every, 1, sample.hook_ns, sample.tokens, sample.queries,
            sample.local_sum, sample.chance_sum, sample.entries, sample.alive, sample.blocks, sample.pending,
            sample.to_pending, sample.to_active, sample.reclaimable_bytes)


def flight_row(flight: model.FlightRecord, wall: WallClock) -> Row:
    """All fields of a flight record."""
    windows, snapshot = (text if len(text) <= FLIGHT_LIMIT else "" for text in (flight.windows, flight.snapshot))
    return (wall(flight.t_ns), flight.t_ns, flight.reason, flight.device, flight.requested_bytes,
            clip(flight.message), windows, snapshot)


def map_row(found: model.MemoryMap, wall: WallClock) -> Row:
    """All fields of a memory map; the newest one of a device is kept."""
    return (found.device, wall(found.t_ns), found.t_ns, found.duration_ns, found.every_ns, int(found.steady),
            found.reserved_bytes, found.allocated_bytes, found.active_bytes, found.requested_bytes, found.segments,
            clip(found.settings), json.dumps(found.holders), found.packed)


def map_of(row: Sequence[Any]) -> model.MemoryMap:
    """The memory map of a row of the table ``maps``."""
    holders = tuple((kind, name, cache) for kind, name, cache in json.loads(row[12]))
    fields = (row[2], row[0], *row[3:5], bool(row[5]), *row[6:12], holders, row[13])
    return model.MemoryMap(*fields)


def flight_of(row: Sequence[Any]) -> model.FlightRecord:
    """The flight record of a row of the table ``flights``."""
    return model.FlightRecord(*row[1:8])


def work_row(work: model.PoolWork, wall: WallClock) -> Row:
    """What a pool did; the last word of a second is kept."""
    return (second(wall(work.t_ns)), work.cache_id, work.t_ns, *origin_row(work.origin), *_tail(work, 3))


def work_of(row: Sequence[Any]) -> model.PoolWork:
    """The work of a row of the table ``pools``."""
    return model.PoolWork(row[2], model.Origin(*row[3:8]), row[1], *row[8:22])


def preemption_row(lost: model.Preemption, wall: WallClock) -> Row:
    """All fields of a preemption."""
    return (wall(lost.t_ns), lost.t_ns, *origin_row(lost.origin), lost.cache_id, clip(lost.request),
            clip(lost.session), lost.cause, clip(lost.wanted_by), lost.tokens_lost, lost.blocks,
            json.dumps(lost.holders))


def preemption_of(row: Sequence[Any]) -> model.Preemption:
    """The preemption of a row of the table ``preemptions``."""
    holders = tuple((request, blocks) for request, blocks in json.loads(row[14]))
    fields = (row[1], model.Origin(*row[2:7]), *row[7:14], holders)
    return model.Preemption(*fields)


def phase_row(phase: model.RequestPhase, wall: WallClock) -> Row:
    """All fields of a phase; ``wall_ns`` is its end."""
    return (wall(phase.t_ns), phase.t_ns, phase.start_ns, wall(phase.start_ns), *origin_row(phase.origin),
            phase.cache_id, clip(phase.request), clip(phase.session), phase.phase, phase.outcome, phase.blocks)


def phase_of(row: Sequence[Any]) -> model.RequestPhase:
    """The phase of a row of the table ``phases``."""
    return model.RequestPhase(row[1], row[2], model.Origin(*row[4:9]), *row[9:15])


def states_row(states: model.RequestStates, wall: WallClock) -> Row:
    """Who is in an engine; the newest word of a cache is kept, its rows with times on the wall clock."""
    rows = [{**msgspec.structs.asdict(one), "request": clip(one.request), "session": clip(one.session),
             **{name: None if t_ns is None else wall(t_ns)
                for name, t_ns in (("arrived_ns", one.arrived_ns), ("since_ns", one.since_ns))}} for one in states.rows]
    return (states.cache_id, wall(states.t_ns), states.t_ns, *origin_row(states.origin), states.block_bytes,
            states.slots, json.dumps(states.counts), json.dumps(rows), states.more, clip(states.next_request),
            states.next_needs, states.next_verdict, clip(states.next_sentence))


def states_of(row: Sequence[Any]) -> model.RequestStates:
    """The states of a row of the table ``requests``; times in its rows are Unix nanoseconds."""
    counts = tuple((state, reason, number) for state, reason, number in json.loads(row[10]))
    rows = tuple(model.RequestRow(**one) for one in json.loads(row[11]))
    fields = (row[2], model.Origin(*row[3:8]), row[0], *row[8:10], counts, rows, *row[12:17])
    return model.RequestStates(*fields)


def decision_row(told: model.Decided, wall: WallClock) -> Row:
    """All fields of a decision."""
    return (wall(told.t_ns), told.t_ns, clip(told.scope), clip(told.policy), told.mode, told.level, told.before,
            told.after, clip(told.reason), json.dumps(told.readings), json.dumps(told.rejected), told.generation)


def decision_of(row: Sequence[Any]) -> model.Decided:
    """The decision of a row of the table ``decisions``."""
    readings = tuple((name, value) for name, value in json.loads(row[9]))
    fields = (*row[1:9], readings, tuple(json.loads(row[10])), row[11])
    return model.Decided(*fields)


def action_row(taken: model.ActionTaken, wall: WallClock) -> Row:
    """All fields of what became of an order."""
    return (wall(taken.t_ns), taken.t_ns, taken.actuator, taken.level, taken.kind, int(taken.undo), taken.generation,
            int(taken.done), taken.bytes, taken.duration_ns, int(taken.late), clip(taken.reason))


def action_of(row: Sequence[Any]) -> model.ActionTaken:
    """The answer of a row of the table ``actions``."""
    fields = (*row[1:5], bool(row[5]), row[6], bool(row[7]), *row[8:10], bool(row[10]), row[11])
    return model.ActionTaken(*fields)


def _tail(record: msgspec.Struct, start: int) -> Row:
    return tuple(getattr(record, name) for name in record.__struct_fields__[start:])
