"""The fold against a second implementation that keeps every event and recomputes each figure from its definition."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs import model
from kvobs.catalog import BY_NAME, LATENCY_BUCKETS, ROWS
from kvobs.metrics import Histogram, Metrics
from tests.events import attention, blocks, origin, step, turn

Key = tuple[str, ...]
Points = dict[str, dict[Key, float]]
WIDTH_MS = 64
OWN_COST = {"kvobs.self.fold.duration", "kvobs.self.window.duration"}
SUMS = st.floats(0, 1e6)

NAMES = st.sampled_from(["m0", "m1", "m2"])
DEVICES = st.sampled_from(["cpu", "meta", "cuda:0"])
SIZES = st.integers(0, 10**9)
NS = st.sampled_from([0, 1, 10**6, 12_000_000, 12_000_001, 10**9]) | st.integers(0, 3 * 10**9)
ORIGINS = st.builds(origin, NAMES, DEVICES, st.sampled_from(["DynamicCache", "StaticCache"]))
PARTS = st.just(()) | st.lists(st.tuples(DEVICES, SIZES, SIZES, SIZES), min_size=1, max_size=3,
                               unique_by=lambda part: part[0]).map(tuple)
CACHES = st.integers(1, 4)
COUNTS = st.lists(st.integers(0, 9), min_size=len(LATENCY_BUCKETS) + 1, max_size=len(LATENCY_BUCKETS) + 1).map(tuple)
EVENTS = st.one_of(
    st.builds(step, origin=ORIGINS, cache_id=CACHES, prefill=st.booleans(), tokens=SIZES, duration_ns=NS, hook_ns=NS,
              kv_bytes=SIZES, kv_reserved_bytes=SIZES, kv_largest_bytes=SIZES, reallocations=SIZES,
              bytes_written=SIZES, bytes_copied=SIZES, by_device=PARTS),
    st.builds(model.Migration, st.just(0), ORIGINS, CACHES, DEVICES, DEVICES, SIZES, SIZES, st.none() | NS),
    st.builds(model.Rewrite, st.just(0), ORIGINS, CACHES, SIZES, SIZES),
    st.builds(model.Resized, st.just(0), ORIGINS, CACHES, SIZES, SIZES, SIZES, PARTS),
    st.builds(model.CacheGone, st.just(0), CACHES),
    st.builds(blocks, origin=ORIGINS, cache_id=st.integers(3, 5), used=SIZES, cached=SIZES, free=SIZES,
              allocations=SIZES, failures=SIZES, preemptions=SIZES),
    st.builds(turn, origin=ORIGINS, outcome=st.sampled_from(["ok", "error"]), start_ns=NS,
              t_ns=NS.map(lambda t: t + 3 * 10**9), ttft_ns=st.none() | NS, tpot_ns=st.none() | NS, hook_ns=NS,
              prompt_tokens=SIZES, new_tokens=SIZES),
    st.builds(model.Allocation, st.just(0), DEVICES, SIZES, NS),
    st.builds(model.AllocationLatencies, st.just(0), DEVICES, COUNTS, NS),
    st.builds(lambda device, used, free, largest: model.AllocatorState(0, device, used + free, used, largest),
              DEVICES, SIZES, SIZES, st.none() | SIZES),
    st.builds(model.OutOfMemory, st.just(0), st.none() | ORIGINS, st.just(""), st.just("")),
    st.builds(model.HookFailed, st.just(0), NAMES, st.just(""), st.just("")),
    st.builds(attention, origin=ORIGINS, cache_id=CACHES, layers=st.sampled_from(["full", "sliding"]),
              every=st.integers(1, 9), queries=SIZES, local_sum=SUMS, chance_sum=SUMS, entries=st.just(10**9),
              alive=SIZES, blocks=st.just(10**9), pending=SIZES, to_pending=SIZES, to_active=SIZES,
              reclaimable_bytes=SIZES),
    st.builds(model.CacheUpdates, st.just(0), ORIGINS, CACHES, st.sampled_from(["full", "sliding"]),
              st.lists(NS, max_size=3).map(tuple)),
    st.builds(model.Poll, st.just(0), st.just("host"), NS, st.lists(st.one_of(
        st.tuples(st.just("process.paging.faults"), st.sampled_from([("minor",), ("major",)]), SIZES),
        st.tuples(st.just("kvobs.heap.usage"), st.sampled_from([("used",), ("free",)]), SIZES)),
        max_size=3, unique_by=lambda reading: reading[:2]).map(tuple)),
    st.builds(model.FlightRecord, st.just(0), NAMES, DEVICES, st.none() | SIZES, st.just(""), st.just(""),
              st.just("")),
    st.builds(model.Availability, NAMES, st.booleans(), st.sampled_from(["", "No driver."])),
)
PROGRAMS = st.lists(st.tuples(st.integers(0, 40_000_000), EVENTS), max_size=30)


def timed(program: Iterable[tuple[int, model.Event]]) -> tuple[list[model.Event], int]:
    """The events in time order, with pools' counters made to rise as a real ledger does."""
    now, events, risen = 0, [], defaultdict(lambda: [0, 0, 0])
    for gap, event in program:
        now += gap
        if isinstance(event, model.Blocks):
            ledger = risen[event.cache_id]
            for index, amount in enumerate((event.allocations, event.failures, event.preemptions)):
                ledger[index] += amount
            event = blocks(**{name: getattr(event, name) for name in event.__struct_fields__} | {
                "allocations": ledger[0], "failures": ledger[1], "preemptions": ledger[2]})
        elif isinstance(event, model.CacheGone):
            risen.pop(event.cache_id, None)
        if isinstance(event, model.Step | model.Allocation | model.AllocatorState | model.Poll):
            event = type(event)(**{name: getattr(event, name) for name in event.__struct_fields__} | {"t_ns": now})
        events.append(event)
    return events, now


def counted(events: list[model.Event]) -> Points:
    """Counters: every event's amounts, listed and then summed."""
    found: Points = defaultdict(lambda: defaultdict(float))

    def add(name: str, key: Key, amount: float) -> None:
        found[name][key] += amount

    last: dict[int, model.Blocks] = {}
    polled: dict[tuple[str, str, Key], float] = {}
    for event in events:
        add("kvobs.self.events", (), 1)
        if isinstance(event, model.Step | model.Turn):
            add("kvobs.out_of_memory", (event.origin.model,), 0)
            add("kvobs.self.hook.failures", (event.origin.source,), 0)
        match event:
            case model.Step():
                o, phase = event.origin, "prefill" if event.prefill else "decode"
                add("kvobs.kv.reallocations", (o.model, o.device, o.cache, phase), event.reallocations)
                add("kvobs.kv.written", (o.model, o.device, o.cache), event.bytes_written)
                add("kvobs.kv.copied", (o.model, o.device, o.cache), event.bytes_copied)
                add("kvobs.step.tokens", (o.model, o.device, phase), event.tokens)
                add("kvobs.self.hook.duration", (o.source,), event.hook_ns / 1e9)
            case model.Rewrite():
                o = event.origin
                add("kvobs.kv.reallocations", (o.model, o.device, o.cache, "rewrite"), event.reallocations)
                add("kvobs.kv.copied", (o.model, o.device, o.cache), event.bytes_copied)
            case model.Migration():
                add("kvobs.migration.io", (event.src, event.dst), event.bytes)
                add("kvobs.migration.operations", (event.src, event.dst), event.buffers)
            case model.Turn():
                add("kvobs.turns", (event.origin.model, event.outcome), 1)
                add("kvobs.self.hook.duration", (event.origin.source,), event.hook_ns / 1e9)
            case model.Blocks():
                o, before = event.origin, last.get(event.cache_id)
                for name, field in (("kvobs.kv.block.allocations", "allocations"),
                                    ("kvobs.kv.block.failures", "failures"), ("kvobs.kv.preemptions", "preemptions")):
                    add(name, (o.model, o.device, o.cache), getattr(event, field) - getattr(before, field, 0))
                last[event.cache_id] = event
            case model.CacheGone():
                last.pop(event.cache_id, None)
            case model.OutOfMemory():
                add("kvobs.out_of_memory", (event.origin.model if event.origin else "unknown",), 1)
            case model.Attention():
                who = (event.origin.model, event.origin.device, event.layers)
                for name, field in (("queries", "queries"), ("local", "local_sum"), ("chance", "chance_sum")):
                    add(f"kvobs.attention.{name}", who, getattr(event, field))
                add("kvobs.attention.entries", (*who, "alive"), event.alive)
                add("kvobs.attention.entries", (*who, "dead"), event.entries - event.alive)
                add("kvobs.attention.transitions", (*who, "pending"), event.to_pending)
                add("kvobs.attention.transitions", (*who, "active"), event.to_active)
            case model.Poll():
                add("kvobs.self.poll.duration", (event.source,), event.duration_ns / 1e9)
                for name, key, value in event.readings:
                    if name == "process.paging.faults":
                        before = polled.get((event.source, name, key), 0)
                        add(name, key, value if value < before else value - before)
                        polled[event.source, name, key] = value
            case model.FlightRecord():
                add("kvobs.flight.records", (event.reason,), 1)
            case model.HookFailed():
                add("kvobs.self.hook.failures", (event.source,), 1)
    return found


def observed(events: list[model.Event]) -> dict[str, dict[Key, list[float]]]:
    """Histograms: the list of observed values."""
    found: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        match event:
            case model.Step():
                phase = "prefill" if event.prefill else "decode"
                found["kvobs.step.duration"][event.origin.model, event.origin.device, phase].append(
                    event.duration_ns / 1e9)
            case model.Migration() if event.duration_ns is not None:
                found["kvobs.migration.duration"][event.src, event.dst].append(event.duration_ns / 1e9)
            case model.CacheUpdates():
                for duration in event.durations_ns:
                    found["kvobs.kv.update.duration"][event.origin.model, event.origin.device, event.layers].append(
                        duration / 1e9)
            case model.Allocation():
                found["kvobs.alloc.latency"][event.device,].append(event.latency_ns / 1e9)
            case model.Turn():
                who = ("text_completion", event.origin.source, event.origin.model)
                for name, key, value in (
                        ("gen_ai.server.request.duration", who, (event.t_ns - event.start_ns) / 1e9),
                        ("gen_ai.server.time_to_first_token", who, event.ttft_ns and event.ttft_ns / 1e9),
                        ("gen_ai.server.time_per_output_token", who, event.tpot_ns and event.tpot_ns / 1e9),
                        ("gen_ai.client.token.usage", (*who, "input"), event.prompt_tokens),
                        ("gen_ai.client.token.usage", (*who, "output"), event.new_tokens)):
                    if value is not None:
                        found[name][key].append(value)
    return found


def counted_natively(events: list[model.Event]) -> dict[Key, list[tuple[tuple[int, ...], float]]]:
    """Allocation latencies that came as counts: (counts, sum in seconds) by device."""
    found: dict[Key, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
    for event in events:
        if isinstance(event, model.AllocationLatencies):
            found[event.device,].append((event.counts, event.sum_ns / 1e9))
    return found


def alive(events: list[model.Event]) -> Points:
    """Gauges of what is alive at the end: caches, pools, allocators, facts; each from its last words."""
    steps: dict[int, tuple[int, model.Step | model.Resized]] = {}
    pools: dict[int, tuple[int, model.Blocks]] = {}
    sampled: dict[tuple[int, str], model.Attention] = {}
    polls: dict[str, model.Poll] = {}
    found: Points = defaultdict(dict)
    for at, event in enumerate(events):
        if isinstance(event, model.Step | model.Resized):
            steps[event.cache_id] = (at, event)
        elif isinstance(event, model.Blocks):
            pools[event.cache_id] = (at, event)
        elif isinstance(event, model.CacheGone):
            steps.pop(event.cache_id, None)
            pools.pop(event.cache_id, None)
            sampled = {key: sample for key, sample in sampled.items() if key[0] != event.cache_id}
        elif isinstance(event, model.Attention):
            sampled[event.cache_id, event.layers] = event
        elif isinstance(event, model.Poll):
            polls[event.source] = event
        elif isinstance(event, model.AllocatorState):
            found["kvobs.allocator.usage"][event.device, "allocated"] = event.allocated_bytes
            found["kvobs.allocator.usage"][event.device, "unused"] = event.reserved_bytes - event.allocated_bytes
        elif isinstance(event, model.Availability):
            found["kvobs.availability"] = {key: value for key, value in found["kvobs.availability"].items()
                                           if key[0] != event.subject}
            found["kvobs.availability"][event.subject, event.reason] = int(event.available)
    for sample in sampled.values():
        who = (sample.origin.model, sample.origin.device, sample.layers)
        for name, key, value in (("blocks", (*who, "pending"), sample.pending),
                                 ("blocks", (*who, "active"), sample.blocks - sample.pending),
                                 ("reclaimable", who, sample.reclaimable_bytes)):
            found[f"kvobs.attention.{name}"][key] = found[f"kvobs.attention.{name}"].get(key, 0) + value
        interval = found["kvobs.attention.interval"]
        interval[who[:1]] = max(interval.get(who[:1], 0), sample.every)
    for poll in polls.values():
        for name, key, value in poll.readings:
            if name == "kvobs.heap.usage":
                found[name][key] = value
    shares: dict[Key, list[tuple[int, int, int]]] = defaultdict(list)
    for cache_id, (at, event) in steps.items():
        parts = event.by_device or (
            (event.origin.device, event.kv_bytes, event.kv_reserved_bytes, event.kv_largest_bytes),)
        if cache_id in pools and pools[cache_id][0] > at and len(parts) == 1:
            pool = pools[cache_id][1]
            parts = ((parts[0][0], pool.used * pool.block_bytes, *parts[0][2:]),)
        for device, *sizes in parts:
            shares[event.origin.model, device, event.origin.cache].append(tuple(sizes))
    for key, sizes in shares.items():
        held, reserved = sum(s[0] for s in sizes), sum(s[1] for s in sizes)
        largest = max(s[2] for s in sizes)
        found["kvobs.kv.usage"][*key, "held"], found["kvobs.kv.usage"][*key, "slack"] = held, reserved - held
        found["kvobs.kv.buffer.largest"][key], found["kvobs.kv.caches"][key] = largest, len(sizes)
        if reserved:
            found["kvobs.kv.fragmentation.article"][key] = 1 - largest / reserved
    for _, pool in pools.values():
        for state in ("used", "cached", "free"):
            key = (pool.origin.model, pool.origin.device, pool.origin.cache, state)
            found["kvobs.kv.blocks"][key] = found["kvobs.kv.blocks"].get(key, 0) + getattr(pool, state)
    return found


def windowed(events: list[model.Event], now: int) -> Points:
    """Windows: the samples younger than the width, from the whole history."""
    young = [event for event in events if getattr(event, "t_ns", 0) > now - WIDTH_MS * 10**6]
    lists: dict[str, dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in young:
        if isinstance(event, model.Step):
            lists["step"][event.origin.model, event.origin.device].append(event.duration_ns / 1e9)
        elif isinstance(event, model.Allocation):
            lists["allocation"][event.device,].append(event.latency_ns / 1e9)
        elif isinstance(event, model.AllocatorState):
            if event.reserved_bytes:
                lists["unused"][event.device,].append(1 - event.allocated_bytes / event.reserved_bytes)
            if event.largest_free_bytes is not None:
                lists["free"][event.device,].append(event.largest_free_bytes)

    def variance(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.fsum((value - mean) ** 2 for value in values) / len(values)

    rows = (("kvobs.window.step.mean", "step", lambda v: math.fsum(v) / len(v)),
            ("kvobs.window.step.variance", "step", variance),
            ("kvobs.window.allocation.variance", "allocation", variance),
            ("kvobs.window.fragmentation", "unused", max), ("kvobs.window.largest_free", "free", min))
    return {name: {key: function(values) for key, values in lists[kind].items()
                   if len(values) > 1 or function is not variance} for name, kind, function in rows}


def folded(events: list[model.Event], now: int, max_series: int, batch: int) -> dict[str, dict[Key, object]]:
    """What the implementation says, the events coming in batches with a refresh after each."""
    metrics = Metrics(window_ms=WIDTH_MS, max_series=max_series, wall=lambda: 0.0, clock=lambda: 0)
    for start in range(0, len(events), batch):
        metrics.fold(events[start:start + batch])
        times = [event.t_ns for event in events[start:start + batch]
                 if isinstance(event, model.Step | model.Allocation | model.AllocatorState | model.Poll)]
        metrics.refresh(max(times, default=0))
    metrics.refresh(now)
    return {row.name: values for row, values in metrics.collect() if row.name not in OWN_COST}


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=2e-9)


@given(PROGRAMS, st.integers(1, 30))
def test_the_fold_equals_a_recomputation(program: list[tuple[int, model.Event]], batch: int) -> None:
    """For any events, cut into any batches, every point equals its definition, and there are no other points."""
    events, now = timed(program)
    found = folded(events, now, max_series=64, batch=batch)
    expected: Points = {**counted(events), **alive(events), **windowed(events, now)}
    for name in {row.name for row in ROWS if row.kind != "histogram"} - OWN_COST:
        mine, theirs = found.get(name, {}), expected.get(name, {})
        assert mine.keys() == theirs.keys(), name
        assert all(same(mine[key], theirs[key]) for key in mine), (name, mine, theirs)  # type: ignore[arg-type]
    values, natively = observed(events), counted_natively(events)
    for name in (row.name for row in ROWS if row.kind == "histogram"):
        more = natively if name == "kvobs.alloc.latency" else {}
        assert found.get(name, {}).keys() == values.get(name, {}).keys() | more.keys(), name
        for key, histogram in found.get(name, {}).items():
            assert isinstance(histogram, Histogram)
            bounds = BY_NAME[name].buckets
            edges = list(zip((-math.inf, *bounds), (*bounds, math.inf), strict=True))
            added = more.get(key, [])
            own = [sum(low < v <= high for v in values[name][key]) for low, high in edges]
            assert histogram.counts == [
                sum(column) for column in zip(own, *(counts for counts, _ in added), strict=True)], name
            assert same(histogram.total, math.fsum(values[name][key]) + math.fsum(total for _, total in added)), name


@given(PROGRAMS, st.integers(1, 3), st.integers(1, 30))
@settings(max_examples=60)
def test_nothing_is_lost_in_other(program: list[tuple[int, model.Event]], max_series: int, batch: int) -> None:
    """However few series are allowed, sums and maxima over all points stay the same, and series stay few."""
    events, now = timed(program)
    found = folded(events, now, max_series, batch)
    expected: Points = {**counted(events), **alive(events)}
    expected.pop("kvobs.availability", None)  # a fact that has no series of its own cannot be taken back
    for name, theirs in expected.items():
        mine = found.get(name, {})
        assert len(mine) <= max_series + 1, name
        own = {key: value for key, value in mine.items() if set(key) != {"other"}}
        assert all(same(value, theirs[key]) for key, value in own.items()), name  # type: ignore[arg-type]
        combine = {"sum": sum, "max": max, "min": min}[BY_NAME[name].across_ranks]
        assert not theirs or same(combine(mine.values()), combine(theirs.values())), name  # type: ignore[type-var]
        if BY_NAME[name].attributes:
            assert (("other",) * len(BY_NAME[name].attributes) in mine) == (len(theirs) > max_series), name
    overflow = found.get("kvobs.self.series.overflow", {})
    assert {key[0] for key in overflow} >= {name for name, values in found.items()
                                            if any(set(key) == {"other"} for key in values)}
