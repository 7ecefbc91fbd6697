"""The live verdict against the twin: a random program runs, caches are alive, then their next step really happens."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.twin import OutOfMemory
from kvobs.allocator.verdict import SUCCEEDS
from kvobs.bus import Bus
from kvobs.sources._torch import TorchSource
from kvobs.sources.transformers._demand import forecast
from tests.accelerator import Accelerator, Cache
from tests.property.test_verdict import hidden

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 400), st.sampled_from([512, 4096, 65_536]), st.booleans())
NOISE = st.one_of(
    st.tuples(st.just("alloc"), st.sampled_from([4096, MIB, 3 * MIB, 12 * MIB, 30 * MIB])),
    st.tuples(st.just("free"), st.integers(0, 99)), st.tuples(st.just("late"), st.integers(0, 99)),
    st.tuples(st.just("empty"), st.just(0)))
SETTINGS = st.sampled_from([
    Settings(), Settings(expandable_segments=True), Settings(max_split_size=24 * MIB),
    Settings(roundup_power2_divisions=(4,) * 16)])


@settings(max_examples=400, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(st.lists(st.one_of(NOISE, NOISE, st.tuples(st.just("cache"), SHAPES)), max_size=30), SHAPES, SETTINGS,
       st.integers(24, 256), st.sampled_from([0, 0, 7]))
def test_the_next_step_becomes_what_was_told(program: list[tuple[str, object]], last: tuple[int, int, int, bool],
                                             config: Settings, has: int, stream: int) -> None:
    """From one snapshot, the request that decides and its verdict are those of the step that then really happens; what
    a breaker is told, from counters alone where they suffice, is whether it succeeds.
    """
    fake = Accelerator(has * MIB, config)
    twin, caches, live = fake.twin, list[Cache](), list[int]()
    for operation, value in [*program, ("cache", last)]:
        try:
            if operation == "cache":
                layers, rows, row_bytes, sliding = value  # type: ignore[misc]
                caches.append(fake.cache(layers, rows, row_bytes, stream, sliding=sliding))
            elif operation == "alloc":
                live.append(twin.alloc(value))  # type: ignore[arg-type]
            elif operation == "empty":
                twin.empty_cache()
            elif live:
                address = live.pop(value % len(live))  # type: ignore[operator]
                if operation == "late":
                    twin.record_stream(address, 9)
                twin.free(address)
        except OutOfMemory:
            pass
    assume(caches and not hidden(twin))
    source = TorchSource(Bus(8), fake)
    source.foresee(lambda: forecast(caches))
    source.install(lambda event: None)
    try:
        told, = source.verdict()
        (device,) = source.live(1, 1.0) or [None]
    finally:
        source.uninstall()
    done, after = fake.step(caches, stream)
    assume(not hidden(after))
    event(str(told.verdict))
    assert told.requests == sum(2 * len(cache.layers) for cache in caches)
    assert told.verdict is not None
    assert device is not None
    event(f"live: {device.verdict}")
    assert (device.verdict in SUCCEEDS) == (done[-1] is not None), (device, told)
    if done[-1] is None:
        assert (told.index, told.verdict in SUCCEEDS) == (len(done) - 1, False), told.sentence
    else:
        worst = max(done, key=lambda one: ("SERVED", "GROW", "RECLAIM").index(str(one)))
        assert (told.index, told.verdict) == (done.index(worst), worst), told.sentence
