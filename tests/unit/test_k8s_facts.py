"""What of a store deserves a Kubernetes event."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvobs import catalog, model
from kvobs.cli import main
from kvobs.cli.k8s import Fact, Pod, Recorder, Watch
from kvobs.store import StoreReader, StoreWriter
from tests.events import ORIGIN, turn

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND


def watched(directory: Path, *events: model.Event, alerts: tuple[float, ...] = ()) -> Watch:
    """A watch of a store with these events, and with an alert's value in each second."""
    now = [0]
    writer = StoreWriter(directory, 64 * 1024**2, "p", clock=lambda: now[0], wall=lambda: WALL)
    writer.write(list(events))
    for second, value in enumerate(alerts):
        now[0] = second * SECOND
        writer.write_points([(catalog.BY_NAME["kvobs.slo.alert"], {("latency", "page", "5m/1h"): value})])
        writer.commit()
    writer.close()
    return Watch(StoreReader(directory))


def short(facts: list[Fact]) -> list[tuple[str, str, bool, int]]:
    return [(one.reason, one.subject, one.warning, (one.wall_ns - WALL) // SECOND) for one in facts]


def test_an_alert_is_told_when_it_begins_and_when_it_ends(tmp_path: Path) -> None:
    """A burning budget is one fact, and its end another, however the seconds are read."""
    who = "objective latency, severity page, windows 5m/1h"
    wanted = [("ErrorBudgetBurning", who, True, 2), ("ErrorBudgetRecovered", who, False, 5)]
    alerts = (0, 0, 1, 1, 1, 0, 0)
    whole = watched(tmp_path / "whole", alerts=alerts)
    assert short(whole.facts(WALL, WALL + 60 * SECOND)) == wanted
    parts = watched(tmp_path / "parts", alerts=alerts)
    assert [one for second in range(8) for one in short(parts.facts(
        WALL + second * SECOND, WALL + (second + 1) * SECOND))] == wanted


def test_a_breaker_that_observes_says_that_nothing_was_done(tmp_path: Path) -> None:
    """Only an opening is a warning; the scope and the level are the subject."""
    def told(at: int, after: str, mode: str) -> model.Decided:
        return model.Decided(at * SECOND, "cpu", "default", mode, 2, "closed", after, "It is full.", (), (), at)

    found = watched(tmp_path / "store", told(1, "open", "observe"), told(2, "closed", "act")).facts(
        WALL, WALL + 60 * SECOND)
    assert short(found) == [("BreakerOpened", "cpu level 2", True, 1), ("BreakerClosed", "cpu level 2", False, 2)]
    assert [one.message for one in found] == [
        "Breaker level 2 of cpu: closed to open. It is full. It only observes: nothing was done.",
        "Breaker level 2 of cpu: closed to closed. It is full."]


def test_an_error_has_the_trace_of_its_session(tmp_path: Path) -> None:
    """The turn of the session that ended with the error gives the trace; without one there is none."""
    store = (turn(trace_id="ab" * 16, t_ns=3 * SECOND), turn(trace_id="cd" * 16, t_ns=3 * SECOND, session="bert"),
             model.OutOfMemory(3 * SECOND, ORIGIN, "anna", "no room"),
             model.OutOfMemory(4 * SECOND, None, "carl", "no"))
    found = watched(tmp_path / "store", *store).facts(WALL, WALL + 60 * SECOND)
    assert [(one.subject, one.trace_id) for one in found] == [("cpu", "ab" * 16), ("unknown", "")]


@pytest.mark.parametrize("length", [0, 100, 900, 960, 1_000, 1_024, 5_000])
def test_a_message_ends_within_the_bound(length: int) -> None:
    """However long Jaeger's address: a link that leaves no room is left out, the trace's id is not."""
    recorder = Recorder(None, Pod("n", "p"), "http://" + "j" * length if length else "")  # type: ignore[arg-type]
    one = Fact(wall_ns=WALL, reason="r", subject="s", message="ä" * 5_000, warning=True, trace_id="ab" * 16)
    message = recorder.body(one, WALL, 1)["message"]
    assert 1_000 < len(message.encode()) <= 1_024
    assert f" Trace {'ab' * 16}" in message
    assert ("/trace/" in message) == (length == 100)


def test_without_the_client_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one sentence with the pip line; so too where the pod is not named."""
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.delitem(sys.modules, "kubernetes.client", raising=False)
    assert main(["k8s-events", "--pod", "p", "--namespace", "n", "--store", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "kvobs: Kubernetes events need the official client; install with: pip install 'kvobs[k8s]'.\n")
    monkeypatch.delenv("POD_NAME", raising=False)
    assert main(["k8s-events", "--namespace", "n"]) == 2
    assert "--pod" in capsys.readouterr().err
