"""Following stores: everything is told once, whatever the clocks say."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from kvobs import catalog, model
from kvobs.store import News, StoreError, StoreReader, StoreWriter, Tail, trace_before
from tests.events import ORIGIN, turn

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND
ALERT = "kvobs.slo.alert"


class Engine:
    """A process that writes a store, with clocks of its own."""

    def __init__(self, directory: Path, name: str = "p", wall: int = WALL, retention_s: int = 0) -> None:
        self.now = 0
        self.writer = StoreWriter(directory, 64 * 1024**2, name, retention_s=retention_s, clock=lambda: self.now,
                                  wall=lambda: wall)

    def fails(self, at_s: float, message: str) -> None:
        self.writer.write([model.OutOfMemory(int(at_s * SECOND), ORIGIN, "anna", message)])
        self.writer.commit()


def said(news: News) -> list[str]:
    return [one.record.message for one in news.events if isinstance(one.record, model.OutOfMemory)]


@pytest.mark.parametrize("wall", [WALL, 1_000 * SECOND, 9_000_000_000 * SECOND])
def test_each_event_is_told_once_by_any_clock(tmp_path: Path, wall: int) -> None:
    """What is committed late, and what an engine with a wrong clock tells, is told; what was there before is not."""
    engine = Engine(tmp_path / "store", wall=wall)
    engine.fails(1, "before")
    tail = Tail(tmp_path / "store", ALERT)
    assert said(tail.look()) == []
    engine.fails(100, "one")
    assert said(tail.look()) == ["one"]
    engine.fails(50, "late by a minute")
    engine.fails(100, "at the same time")
    assert said(tail.look()) == ["late by a minute", "at the same time"]
    engine.writer.close()
    assert said(tail.look()) == []


def test_a_store_that_comes_later_is_told_whole(tmp_path: Path) -> None:
    """Without a store there is an error; one that comes is read from its beginning, also beside another one."""
    tail = Tail(tmp_path / "store", ALERT)
    with pytest.raises(StoreError):
        tail.look()
    first = Engine(tmp_path / "store")
    first.fails(1, "one")
    assert said(tail.look()) == ["one"]
    second = Engine(tmp_path / "store", "q", wall=WALL - 3_600 * SECOND)
    second.fails(1, "of another clock")
    first.fails(2, "two")
    assert sorted(said(tail.look())) == ["of another clock", "two"]
    first.writer.close()
    second.writer.close()
    assert said(tail.look()) == []


def test_a_table_that_was_emptied_is_followed_on(tmp_path: Path) -> None:
    """Where retention took all rows, SQLite gives their numbers again; the new ones are told all the same."""
    engine = Engine(tmp_path / "store")
    for at in range(3):
        engine.fails(at, "old")
    tail = Tail(tmp_path / "store", ALERT)
    (store,) = StoreReader(tmp_path / "store").stores()
    with sqlite3.connect(store.path) as connection:
        connection.execute("DELETE FROM events")
    connection.close()
    engine.fails(100, "new")
    engine.fails(100, "new too")
    assert said(tail.look()) == ["new", "new too"]
    engine.fails(101, "more")
    assert said(tail.look()) == ["more"]
    engine.writer.close()


def test_decisions_and_samples_are_followed_too(tmp_path: Path) -> None:
    """Each decision and each sample of the metric once, and no other metric's."""
    engine = Engine(tmp_path / "store", wall=5 * SECOND)

    def second(at: int) -> None:
        engine.now = at * SECOND
        engine.writer.write([model.Decided(at * SECOND, "cpu", "default", "act", 1, "closed", "open", "", (), (), at)])
        engine.writer.write_points([(catalog.BY_NAME[ALERT], {("latency", "page", "5m/1h"): float(at)}),
                                    (catalog.BY_NAME["kvobs.slo.target"], {("latency",): 7.0})])
        engine.writer.commit()

    second(1)
    tail = Tail(tmp_path / "store", ALERT)
    for at in (2, 3):
        second(at)
        news = tail.look()
        assert [one.record.generation for one in news.decisions] == [at]
        assert [point.value for point in news.points] == [at]
    engine.writer.close()
    assert tail.look() == News([], [], [])


def test_the_trace_before_is_the_newest_of_the_process(tmp_path: Path) -> None:
    """Turns without a trace, of others, and from outside the time are passed over."""
    mine, other = Engine(tmp_path / "store"), Engine(tmp_path / "store", "q")
    mine.writer.write([turn(trace_id=trace, t_ns=at * SECOND, session=session) for at, trace, session in (
        (1, "a1", "anna"), (2, "b2", "bert"), (3, "", "anna"), (9, "a9", "anna"))])
    other.writer.write([turn(trace_id="q3", t_ns=3 * SECOND)])
    mine.writer.close()
    other.writer.close()
    reader = StoreReader(tmp_path / "store")
    for session, since, until, expected in (("", 0, 3, "b2"), ("anna", 0, 3, "a1"), ("anna", 2, 8, ""),
                                            ("anna", 0, 9, "a9"), ("carl", 0, 9, "")):
        assert trace_before(reader, "p", session, WALL + since * SECOND, WALL + until * SECOND) == expected
