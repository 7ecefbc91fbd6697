"""A scenario from its first line to its exit code."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

from kvobs import virtual
from kvobs.lab.demo._device import preparing
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._observer import Observer
from kvobs.lab.demo._progress import say, stage
from kvobs.lab.demo._run import ending
from kvobs.lab.scenarios._truth import Claim, Played, Scenario, claims

AGREE, DISAGREE = 0, 1
ALL = 100.0  # the forward passes of so small a model are short, and none may pass unobserved


def run(name: str, *, as_json: bool = False, hold_s: float = 0) -> int:
    """Play a scenario in this process, and say what kvobs said of it beside the truth.

    Args:
        name: one of ``SCENARIOS``.
        as_json: one JSON object on stdout and nothing else there.
        hold_s: how many seconds metrics go on being served afterwards, with everything that is alive still alive.
    Returns:
        The exit code: 0 where kvobs told the truth, 1 where not, 2 after a refusal (one sentence on stderr), 130
        after an interrupt.
    Raises:
        kvobs.config.ConfigError: a setting of kvobs was refused.
    """
    def body() -> int:
        from kvobs.lab.scenarios._scenarios import SCENARIOS

        if name not in SCENARIOS:
            raise DemoError(f"There is no scenario '{name}'; there are {', '.join(SCENARIOS)}.")
        return _play(SCENARIOS[name], as_json, hold_s)

    return ending(body)


def _play(scenario: Scenario, as_json: bool, hold_s: float) -> int:
    truth = scenario.truth
    try:
        with stage(preparing()):
            virtual.setup(scenario.devices)
    except virtual.Unavailable as error:
        raise DemoError(str(error)) from None
    observer = Observer(overhead_percent=ALL)
    try:
        if observer.metrics is not None:
            say(f"Metrics are served at {observer.metrics} while the scenario runs.")
        from kvobs.lab.demo._chat import one_thread

        with one_thread(), stage(f"Playing {truth.scenario}"):
            played = scenario.play(observer)
        found = claims(truth, played.said)
        agree = all(claim.agrees for claim in found)
        if as_json:
            print(json.dumps(_told(scenario, played, found, agree, observer)), flush=True)
        else:
            _show(scenario, played, found, agree)
            print("\n" + "\n".join(observer.places()), flush=True)
        _hold(hold_s, played)
    finally:
        observer.close()
    return AGREE if agree else DISAGREE


def _hold(seconds: float, played: Played) -> None:
    """Wait, while what the scenario left alive is alive; an interrupt ends it early."""
    if seconds:
        say(f"Holding for {seconds:g} s, with {len(played.alive)} things kept alive; Ctrl-C ends it.")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait(seconds)


def _told(scenario: Scenario, played: Played, found: Sequence[Claim], agree: bool,
          observer: Observer) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    truth = scenario.truth
    return {
        "scenario": truth.scenario,
        "happens": truth.happens,
        "devices_bytes": list(scenario.devices),
        "claims": [{"name": claim.expected.name, "relation": claim.expected.relation, "truth": claim.expected.value,
                    "because": claim.expected.because, "said": claim.said, "agrees": claim.agrees} for claim in found],
        "sentence": played.sentence,
        "agree": agree,
        "process": observer.process,
        "metrics": observer.metrics,
    }


def _show(scenario: Scenario, played: Played, found: Sequence[Claim], agree: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from kvobs.lab.demo._report import WIDTH

    sizes = " and ".join(f"{size // 2**20} MiB" for size in scenario.devices)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
    console.print(f"Scenario {scenario.truth.scenario} (virtual GPU of {sizes}; compute is the CPU's). "
                  f"{scenario.truth.happens}\n")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "the truth", "kvobs said", ""):
        table.add_column(column, overflow="fold")
    for expected, said, agrees in found:
        relation = "" if expected.relation == "=" else f"{expected.relation} "
        table.add_row(expected.name.replace("_", " "), relation + _text(expected.value), _text(said),
                      "agrees" if agrees else "DIFFERS")
    console.print(table)
    console.print(f"\nkvobs: {played.sentence}")
    console.print("Truth and kvobs agree." if agree else "kvobs did not tell the truth.")


def _text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(_text(one) for one in value)
        case dict():
            return ", ".join(f"{name}: {_text(one)}" for name, one in value.items())
    return str(value)
