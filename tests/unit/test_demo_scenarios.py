"""Truths and claims, without playing anything."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs.lab.demo._run import ending
from kvobs.lab.scenarios import SCENARIOS, Expected, Truth, claims
from kvobs.store import StoreError

TRUTH = Truth("one", "Something happens.", (
    Expected("verdict", "CAPACITY", "it is so"), Expected("free_bytes", 10, "at least that", ">="),
    Expected("left_bytes", 5, "at most that", "<="), Expected("remedy", None, "there is none")))
RIGHT = {"verdict": "CAPACITY", "free_bytes": 10, "left_bytes": 5, "remedy": None}


def test_the_truth_agrees_with_itself() -> None:
    """What is exactly as expected agrees in every relation."""
    assert [claim.agrees for claim in claims(TRUTH, RIGHT)] == [True] * 4
    assert [claim.said for claim in claims(TRUTH, RIGHT)] == list(RIGHT.values())


@pytest.mark.parametrize(("name", "said"), [
    ("verdict", "FRAGMENTED"), ("verdict", None), ("free_bytes", 9), ("free_bytes", None), ("left_bytes", 6),
    ("remedy", "expandable_segments:True")])
def test_what_differs_is_found(name: str, said: Any) -> None:
    """One wrong or missing value makes that claim disagree and no other."""
    found = claims(TRUTH, RIGHT | {name: said})
    assert [claim.expected.name for claim in found if not claim.agrees] == [name]


def test_what_is_not_said_does_not_agree() -> None:
    """Silence is no agreement, also where nothing was expected."""
    assert not any(claim.agrees for claim in claims(TRUTH, {}))


def test_the_registry_says_names_once() -> None:
    """Each scenario is under its own name, with distinct expectations whose reasons are told."""
    assert list(SCENARIOS) == ["fragmentation", "oom", "migration", "leak"]
    for name, scenario in SCENARIOS.items():
        names = [one.name for one in scenario.truth.expected]
        assert scenario.truth.scenario == name
        assert len(set(names)) == len(names)
        assert all(one.because for one in scenario.truth.expected)
        assert scenario.truth.value(names[0]) == scenario.truth.expected[0].value
    with pytest.raises(KeyError):
        SCENARIOS["oom"].truth.value("nothing")


def test_a_store_without_records_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing could be recorded (a full disk), a scenario and the demo end with 1 and one sentence."""
    def body() -> int:
        raise StoreError("There is no kvobs store in there.")

    assert ending(body) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "kvobs: There is no kvobs store in there.\n")
