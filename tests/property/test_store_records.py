"""Records through the writer and the reader: what comes back is what went in."""

from __future__ import annotations

import functools
import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs import catalog, model
from kvobs.metrics import Histogram
from kvobs.store import StoreReader, StoreWriter

WALL = 1_700_000_000_000_000_000
BOUND = 64 * 1024**2

# Times lie within an hour, so that seconds are shared; counts go up to what SQLite's integers hold.
times = st.integers(0, 3_600 * 10**9)
counts = st.integers(0, 2**63 - 1)
small = st.integers(0, 2**40)
words = st.text(max_size=20)
origins = st.builds(model.Origin, words, words, words, words, words)
moves = st.lists(st.tuples(words, words, counts, counts), max_size=3).map(tuple)
turns = st.builds(
    model.Turn, times, times, counts, origins, small, words, words, small, words, small, counts, counts, counts, counts,
    counts, counts, counts, counts, counts, moves, st.none() | counts, st.none() | counts, st.none() | counts, small,
    words, words, st.booleans())
migrations = st.builds(model.Migration, times, origins, small, words, words, small, counts, st.none() | counts)
rare = st.one_of(st.builds(model.OutOfMemory, times, st.none() | origins, words, words),
                 st.builds(model.HookFailed, times, words, words, words),
                 st.builds(model.CacheGone, times, small))
pools = st.builds(model.Blocks, times, origins, st.integers(0, 2), small, small, small, small, small, small, small)
steps = st.builds(model.Step, times, small, small, origins, st.integers(0, 2), st.booleans(), small, small, small,
                  small, small, small, small)
rewrites = st.builds(model.Rewrite, times, origins, st.integers(0, 2), small, small)
resizes = st.builds(model.Resized, times, origins, st.integers(0, 2), small, small, small)


def through(directories: pytest.TempPathFactory, parts: list[list[model.Event]]) -> StoreReader:
    """The parts written in one commit each by one writer, and a reader of what is there."""
    directory = directories.mktemp("store")
    writer = StoreWriter(directory, BOUND, "p", clock=lambda: 0, wall=lambda: WALL)
    for part in parts:
        writer.write(part)
        writer.commit()
    writer.close()
    assert writer.take_dropped() == 0
    return StoreReader(directory)


def in_time(records: list[model.Event]) -> list[model.Event]:
    return sorted(records, key=lambda record: record.t_ns)  # type: ignore[union-attr]


@settings(max_examples=40)
@given(st.lists(turns, max_size=6), st.lists(migrations, max_size=6), st.lists(rare, max_size=6), st.booleans())
def test_records_come_back_in_the_order_of_time(
        tmp_path_factory: pytest.TempPathFactory, a: list[model.Turn], b: list[model.Migration], c: list[model.Event],
        at_once: bool) -> None:
    """Turns, migrations and rare events come back equal, ordered by time, with Unix times by the one anchor."""
    reader = through(tmp_path_factory, [[*a, *b, *c]] if at_once else [[*a], [*b], [*c]])
    for written, read in ((a, reader.turns()), (b, reader.migrations()), (c, reader.events())):
        assert [stored.record for stored in read] == in_time(list(written))
        assert all(stored.wall_ns == WALL + stored.record.t_ns and stored.process == "p" for stored in read)


@settings(max_examples=40)
@given(st.lists(turns, min_size=1, max_size=8))
def test_turns_are_selected_by_session_and_time(tmp_path_factory: pytest.TempPathFactory,
                                                  written: list[model.Turn]) -> None:
    """A session's turns are those of that session, and a time range includes its beginning but not its end."""
    reader = through(tmp_path_factory, [list(written)])
    session, moment = written[0].session, WALL + written[0].t_ns
    of_session = in_time([turn for turn in written if turn.session == session])
    assert [stored.record for stored in reader.turns(session)] == of_session
    before, after = reader.turns(until_wall_ns=moment), reader.turns(since_wall_ns=moment)
    assert [s.record for s in before + after] == in_time(list(written))
    assert all(stored.wall_ns < moment for stored in before)


@settings(max_examples=40)
@given(st.lists(st.lists(steps | rewrites | resizes, max_size=8), max_size=4))
def test_steps_are_summed_per_second_and_cache(tmp_path_factory: pytest.TempPathFactory,
                                                 parts: list[list[model.Step | model.Rewrite | model.Resized]]) -> None:
    """A row holds the sums of its second's steps and rewrites of one cache, and the sizes known last."""
    expected: dict[tuple[int, int], dict[str, int | None]] = {}
    for event in (event for part in parts for event in part):
        second = (WALL + event.t_ns) // 10**9 * 10**9
        row = expected.setdefault((second, event.cache_id), {
            "steps": 0, "prefill_steps": 0, "tokens": 0, "prefill_tokens": 0, "reallocations": 0, "bytes_written": 0,
            "bytes_copied": 0, "duration_ns": 0, "hook_ns": 0, "kv_bytes": None})
        add = {}
        if not isinstance(event, model.Resized):
            add = {"reallocations": event.reallocations, "bytes_copied": event.bytes_copied}
        if not isinstance(event, model.Rewrite):
            row["kv_bytes"] = event.kv_bytes
        if isinstance(event, model.Step):
            add |= {"steps": 1, "tokens": event.tokens, "bytes_written": event.bytes_written,
                    "duration_ns": event.duration_ns, "hook_ns": event.hook_ns}
            if event.prefill:
                add |= {"prefill_steps": 1, "prefill_tokens": event.tokens}
        for name, amount in add.items():
            row[name] = (row[name] or 0) + amount
    found = {(stored.wall_ns, stored.record.cache_id): {name: getattr(stored.record, name) for name in row}
             for stored in through(tmp_path_factory, [list(part) for part in parts]).steps()
             for row in [expected[stored.wall_ns, stored.record.cache_id]]}
    assert found == expected


@settings(max_examples=40)
@given(st.lists(st.lists(pools, max_size=8), max_size=3))
def test_the_last_state_of_a_pool_in_a_second_is_kept(tmp_path_factory: pytest.TempPathFactory,
                                                     parts: list[list[model.Blocks]]) -> None:
    """Of a pool's states within one second the one written last comes back, whole."""
    last = {((WALL + pool.t_ns) // 10**9, pool.cache_id): pool for part in parts for pool in part}
    found = {(stored.wall_ns // 10**9, stored.record.cache_id): stored.record
             for stored in through(tmp_path_factory, [list(part) for part in parts]).blocks()}
    assert found == last


@settings(max_examples=30)
@given(st.lists(st.tuples(st.dictionaries(st.tuples(words, words), st.floats() | st.integers(0, 2**53), max_size=5),
                          st.lists(st.floats(0, 10), max_size=5)), max_size=4))
def test_points_come_back_with_their_attributes(
        tmp_path_factory: pytest.TempPathFactory,
        samples: list[tuple[dict[tuple[str, str], float], list[float]]]) -> None:
    """Every sample of a metric comes back with its attributes; NaN leaves no point; histograms keep their counts."""
    counter, histogram = catalog.BY_NAME["kvobs.migration.io"], catalog.BY_NAME["kvobs.alloc.latency"]
    directory, now = tmp_path_factory.mktemp("store"), [0]
    writer = StoreWriter(directory, BOUND, "p", clock=lambda: now[0], wall=lambda: WALL)
    numbers, histograms = [], []
    for values, observed in samples:
        now[0] += 10**9
        state = Histogram(histogram.buckets)
        for value in observed:
            state.observe(value, None)
        writer.write_points([(counter, dict(values)), (histogram, {("cpu",): state})])
        numbers += [(WALL + now[0], {"src": src, "dst": dst}, value)
                    for (src, dst), value in values.items() if value == value]
        cells = [sum(1 for value in observed if low < value <= high)
                 for low, high in zip((-1.0, *histogram.buckets), (*histogram.buckets, float("inf")), strict=True)]
        total = functools.reduce(operator.add, observed, 0.0)
        histograms.append((WALL + now[0], total, len(observed), tuple(cells), histogram.buckets))
    writer.close()
    assert writer.take_dropped() == 0
    reader = StoreReader(directory)

    def by_all(row: tuple[object, ...]) -> str:
        return repr(row)

    found = [(point.wall_ns, point.attributes, point.value) for point in reader.points("kvobs.migration.io")]
    assert sorted(found, key=by_all) == sorted([(t, a, float(v)) for t, a, v in numbers], key=by_all)
    kept = [(p.wall_ns, p.value, p.count, p.buckets, p.bounds) for p in reader.points("kvobs.alloc.latency")]
    assert kept == histograms
