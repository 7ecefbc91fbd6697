"""The bus: bounded, counting, never blocking."""

from __future__ import annotations

import threading

from kvobs import model
from kvobs.bus import Bus
from tests.events import step


def test_a_full_bus_drops_the_newest_and_counts() -> None:
    """Beyond the limit events are dropped and counted once; what was queued stays, oldest first."""
    bus = Bus(3)
    for number in range(5):
        bus.publish(step(t_ns=number))
    assert [event.t_ns for event in bus.drain()] == [0, 1, 2]
    assert bus.take_dropped() == 2
    assert bus.take_dropped() == 0


def test_drops_are_counted_between_takings() -> None:
    """Each taking returns exactly the drops since the one before, however many takings there were."""
    bus = Bus(1)
    bus.publish(step())
    taken = []
    for dropped in (0, 1, 0, 0, 3, 2):
        for _ in range(dropped):
            bus.publish(step())
        taken.append(bus.take_dropped())
    assert taken == [0, 1, 0, 0, 3, 2]


def test_a_drain_ends_although_events_keep_coming() -> None:
    """A drain yields what was queued when it began; an event published meanwhile waits for the next one."""
    bus = Bus(10)
    bus.publish(step(t_ns=1))
    bus.publish(step(t_ns=2))
    seen = []
    for event in bus.drain():
        seen.append(event.t_ns)
        bus.publish(step(t_ns=event.t_ns + 10))
    assert seen == [1, 2]
    assert [event.t_ns for event in bus.drain()] == [11, 12]


def test_a_drained_bus_takes_events_again() -> None:
    """Draining frees the room that was full."""
    bus = Bus(2)
    for _ in range(2):
        for number in range(2):
            bus.publish(step(t_ns=number))
        assert len(list(bus.drain())) == 2
    assert bus.take_dropped() == 0


def test_clear_forgets_events_and_drops() -> None:
    """In a forked child neither the parent's events nor its drops are reported again."""
    bus = Bus(1)
    bus.publish(step())
    bus.publish(step())
    bus.take_dropped()
    bus.publish(step())
    bus.clear()
    assert list(bus.drain()) == []
    assert bus.take_dropped() == 0
    bus.publish(step())
    bus.publish(step())
    assert bus.take_dropped() == 1


def test_threads_lose_nothing_uncounted() -> None:
    """With four producers and a draining consumer, published = drained + dropped, and each thread's order holds."""
    bus = Bus(64)
    each, threads = 5_000, 4
    go = threading.Barrier(threads + 1)

    def produce(who: int) -> None:
        go.wait()
        for number in range(each):
            bus.publish(step(cache_id=who, t_ns=number))

    producers = [threading.Thread(target=produce, args=(who,)) for who in range(threads)]
    for producer in producers:
        producer.start()
    drained: list[model.Event] = []
    dropped = 0
    go.wait()
    while any(producer.is_alive() for producer in producers):
        drained += bus.drain()
        dropped += bus.take_dropped()
    for producer in producers:
        producer.join()
    drained += bus.drain()
    dropped += bus.take_dropped()
    assert len(drained) + dropped == each * threads
    for who in range(threads):
        order = [event.t_ns for event in drained if event.cache_id == who]
        assert order == sorted(set(order))


def test_the_bound_holds_under_threads() -> None:
    """Nobody drains: the queue ends at its limit (each thread can at most be one past the test), the rest dropped."""
    bus = Bus(100)
    threads = [threading.Thread(target=lambda: [bus.publish(step()) for _ in range(1_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = len(list(bus.drain()))
    assert 100 <= kept <= 103
    assert kept + bus.take_dropped() == 4_000


def test_the_end_of_a_cache_may_go_over_the_limit() -> None:
    """A full bus still takes the ends of caches, up to twice the limit, so that none counts as alive for ever."""
    bus = Bus(2)
    for _ in range(3):
        bus.publish(step())
    for number in range(5):
        bus.publish(model.CacheGone(number, number))
    assert [type(event) for event in bus.drain()] == [model.Step] * 2 + [model.CacheGone] * 2
    assert bus.take_dropped() == 4


def test_the_first_event_wakes_and_is_queued() -> None:
    """``wake`` is told of the event before it is queued, until it takes itself away."""
    bus, told = Bus(5), []

    def wake(event: model.Event) -> None:
        told.append((event, len(list(bus.drain()))))
        bus.wake = None

    bus.wake = wake
    for number in range(2):
        bus.publish(step(t_ns=number))
    assert [(event.t_ns, queued) for event, queued in told] == [(0, 0)]
    assert [event.t_ns for event in bus.drain()] == [0, 1]
