"""What a process with a breaker publishes for gates, and that a fork or an end takes it away."""

from __future__ import annotations

from pathlib import Path

from kvobs import model
from kvobs.breaker import Protection
from kvobs.breaker._board import BoardReader, board_directory
from kvobs.breaker._gate import Probation
from kvobs.breaker._limits import UNLIMITED, ByPriority, by_priority
from kvobs.config import Config, Objective
from kvobs.metrics import Metrics
from tests import events

SECOND = 10**9
POLICY = """
name = "load"
escalate = "1s"
""" + "".join(f'[[level]]\nany = [{{ signal = "app.load", above = {limit} }}]\n' for limit in (1, 2, 3))


def made(directory: Path, mode: str) -> Protection:
    (directory / "policy.toml").write_text(POLICY)
    return Protection(Config(store=directory, breaker=mode, breaker_policy=str(directory / "policy.toml")), "one",
                      Metrics(), list)


def test_gates_see_the_level_and_its_limits(tmp_path: Path) -> None:
    """Level 3 in mode act: sheddable requests are refused, critical ones are not touched; events tell the decisions."""
    protection, told = made(tmp_path, "act"), list[model.Event]()
    reader = BoardReader(board_directory(tmp_path))
    try:
        for second in range(1, 6):
            protection.report("app.load", 9.0, second * SECOND)
            protection.follow(second * SECOND, told, [], True)
        found = reader.decision()
        assert found is not None
        assert (found.level, found.mode, found.generation) == (3, "act", 3)
        critical, normal, sheddable = found.limits
        assert (critical, normal.admit, sheddable.admit) == (UNLIMITED, True, False)
        assert [one.level for one in told if isinstance(one, model.Decided)] == [1, 2, 3]
    finally:
        protection.stop(6 * SECOND)
        protection.stop(6 * SECOND)
    assert BoardReader(board_directory(tmp_path)).decision() is None


def test_on_probation_limits_stay_and_tickets_are_out(tmp_path: Path) -> None:
    """While level 3 is half-open gates see its limits and two tickets, an objective's time for the first byte, and a
    new ticket as soon as one was used; afterwards level 2 and no limits.
    """
    (tmp_path / "policy.toml").write_text(POLICY + 'open = "1s"\nhalf_open = "4s"\nprobes = 2\nprobe_every = "0s"\n')
    first = Objective(name="first-token", signal="time_to_first_token", at_most=800_000_000, target=0.99)
    protection = Protection(Config(store=tmp_path, breaker="act", breaker_policy=str(tmp_path / "policy.toml"),
                                   objectives=(first,)), "one", Metrics(), list)
    assert protection.breaker is not None
    reader, limited = BoardReader(board_directory(tmp_path)), ByPriority()
    seen: list[tuple[int, tuple[int, ...] | None]] = []
    try:
        for second in range(1, 12):
            protection.report("app.load", 9.0 if second < 4 else 2.5, second * SECOND)
            protection.follow(second * SECOND, [], [], False)
            found = reader.decision()
            assert found is not None
            seen.append((found.level, found.probation.tickets if found.probation else None))
            if found.probation is not None:
                assert found.probation == Probation("one", found.probation.tickets, 2, 800_000_000)
                protection.breaker.probing.told(found.probation.tickets[0], None)
            assert found.limits == by_priority(limited, found.level)
    finally:
        protection.stop(12 * SECOND)
    assert seen == [(1, None), (2, None), (3, None), (3, None), (3, (1, 2)), (3, (2, 3)), (3, (3, 4)), (3, (4, 5)),
                    (2, None), (2, None), (2, None)]


def test_a_refused_policy_is_an_availability() -> None:
    """A process whose policy is refused has no breaker, and says why."""
    protection = Protection(Config(store=None, breaker="act", breaker_policy="/no/policy.toml"), "one", Metrics(), list)
    protection.follow(SECOND, [], [], True)
    fact, = protection.facts
    assert (protection.breaker, fact.available) == (None, False)
    assert fact.reason.startswith("There is no policy '/no/policy.toml'")


def test_without_a_store_there_is_no_board(tmp_path: Path) -> None:
    """The breaker decides all the same."""
    (tmp_path / "policy.toml").write_text(POLICY)
    protection, told = Protection(Config(store=None, breaker="observe", breaker_policy=str(tmp_path / "policy.toml")),
                                  "one", Metrics(), list), list[model.Event]()
    protection.report("app.load", 1.5, SECOND)
    protection.follow(SECOND, told, [], True)
    assert [one.level for one in told if isinstance(one, model.Decided)] == [1]
    assert not (tmp_path / "boards").exists()
    protection.stop(SECOND)


def test_a_child_leaves_the_board_to_its_parent(tmp_path: Path) -> None:
    """After ``abandon`` nothing is decided, and the file is still there for whoever wrote it."""
    protection = made(tmp_path, "observe")
    protection.follow(SECOND, [], [], True)
    protection.abandon()
    protection.report("app.load", 9.0, SECOND)
    told: list[model.Event] = []
    protection.follow(2 * SECOND, told, [], True)
    assert told == []
    assert list((tmp_path / "boards").glob("*.board"))


def test_a_scope_that_is_gone_has_no_level() -> None:
    """Once a pool is freed, and nothing is engaged for it, its gauge has no point rather than the last one."""
    metrics = Metrics()
    protection = Protection(Config(store=None, breaker="observe"), "one", metrics, list)

    def scopes() -> set[str]:
        return {key[0] for row, values in metrics.collect() if row.name == "kvobs.breaker.level" for key in values}

    protection.follow(SECOND, [events.blocks(t_ns=SECOND, cache_id=1)], [], True)
    assert scopes() == {"tiny@cpu"}
    protection.follow(2 * SECOND, [model.CacheGone(2 * SECOND, 1)], [], True)
    assert scopes() == {"process"}


def test_signals_that_nothing_tells_are_said() -> None:
    """A policy's signals are unavailable with a reason until something tells them, and then available."""
    protection, told = Protection(Config(store=None, breaker="observe", breaker_policy="article"), "one", Metrics(),
                                  list), list[model.Event]()
    protection.follow(SECOND, told, [], True)
    names = {"cpu", "hit_rate", "gateway_p99", "pool_use", "fragmentation_article"}
    assert {one.subject for one in told if isinstance(one, model.Availability) and not one.available} == {
        f"breaker signal {name}" for name in names}
    protection.report("cpu", 0.5, SECOND)
    later: list[model.Event] = []
    protection.follow(SECOND + 1, later, [], False)  # between two samples: said with the next one
    assert later == []
    protection.follow(2 * SECOND, later, [], True)
    assert {one.subject: one.available for one in later if isinstance(one, model.Availability)} == {
        f"breaker signal {name}": name == "cpu" for name in names} | {"breaker policy": True}
