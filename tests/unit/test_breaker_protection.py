"""What a process with a breaker publishes for gates, and that a fork or an end takes it away."""

from __future__ import annotations

from pathlib import Path

from kvobs import model
from kvobs.breaker import Protection
from kvobs.breaker._board import BoardReader, board_directory
from kvobs.breaker._limits import UNLIMITED
from kvobs.config import Config
from kvobs.metrics import Metrics

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
    assert len(told) == 1
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
