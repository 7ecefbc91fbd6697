"""Profiles: what each sets, what wins over it, and what ``kvobs doctor`` says of it."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from kvobs import config
from kvobs.cli import main
from kvobs.cli._profile_facts import profile
from kvobs.config import Config, load
from tests.support import child_environment, run_child

DAY = 86_400
# Written by hand from the article (S18): percent of traces, days, depth, masking, prompts.
EXPECTED = {"production": (1.5, 90 * DAY, "chain", "payloads", False),
            "staging": (15.0, 14 * DAY, "chain", "secrets", True),
            "ci": (100.0, 3 * DAY, "edges", "secrets", False),
            "off": (None, 0, "chain", "off", False)}
NAMES = ("trace_sample", "retention", "span_depth", "mask", "record_prompts")
# Of each setting, a text that no profile means by it, and its value.
OWN = {"trace_sample": ("7%", 7.0), "retention": ("5h", 18_000), "span_depth": ("edges", "edges"),
       "mask": ("off", "off"), "record_prompts": ("on", True)}


def values(found: Config) -> tuple[object, ...]:
    return tuple(getattr(found, name) for name in NAMES)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_profile_sets_what_the_article_says(name: str, tmp_path: Path) -> None:
    """From the environment, from a file and as an option alike; every other setting is as without it."""
    file = tmp_path / "kvobs.toml"
    file.write_text(f'profile = "{name}"\n', encoding="utf-8")
    found = [load({"KVOBS_PROFILE": name}), load({"KVOBS_CONFIG": str(file)}), load({}, profile=name)]
    for one in found:
        assert values(one) == EXPECTED[name]
        assert one == Config(store=load({}).store, profile=name, **dict(zip(NAMES, EXPECTED[name], strict=True)))


def test_no_profile_is_as_ever() -> None:
    """Without a profile, and with the profile off, the configuration is that of the defaults."""
    assert load({"KVOBS_PROFILE": "off"}) == load({}) == Config(store=load({}).store)


@pytest.mark.parametrize("profile_name", [name for name in EXPECTED if name != "off"])
def test_every_setting_wins_over_the_profile(profile_name: str, tmp_path: Path) -> None:
    """Every subset of the settings, set from anywhere, has its own values, and the others have the profile's."""
    file = tmp_path / "kvobs.toml"
    for size in range(len(NAMES) + 1):
        for own in itertools.combinations(NAMES, size):
            expected = tuple(OWN[name][1] if name in own else of_profile
                             for name, of_profile in zip(NAMES, EXPECTED[profile_name], strict=True))
            environ = {f"KVOBS_{name.upper()}": OWN[name][0] for name in own}
            file.write_text("".join(f'{name} = "{OWN[name][0]}"\n' for name in own), encoding="utf-8")
            assert values(load({"KVOBS_PROFILE": profile_name, **environ})) == expected
            assert values(load({**environ, "KVOBS_PROFILE": profile_name})) == expected
            assert values(load({"KVOBS_CONFIG": str(file), "KVOBS_PROFILE": profile_name})) == expected
            assert values(load({}, profile=profile_name, **{name: OWN[name][0] for name in own})) == expected


def test_the_standard_sampler_wins_over_a_profile_and_loses_to_the_setting() -> None:
    """OTEL_TRACES_SAMPLER is an operator's own word, so only KVOBS_TRACE_SAMPLE wins over it."""
    environ = {"KVOBS_PROFILE": "production", "OTEL_TRACES_SAMPLER": "always_on"}
    assert load(environ).trace_sample is None
    assert load(environ).retention == 90 * DAY
    assert load({**environ, "KVOBS_TRACE_SAMPLE": "2%"}).trace_sample == 2.0
    assert load({**environ, "OTEL_TRACES_SAMPLER": " "}).trace_sample == 1.5


def test_origins_say_where_each_value_came_from(tmp_path: Path) -> None:
    """Default, file, environment, option or profile, for every setting."""
    file = tmp_path / "kvobs.toml"
    file.write_text('retention = "2d"\n', encoding="utf-8")
    environ = {"KVOBS_CONFIG": str(file), "KVOBS_PROFILE": "ci", "KVOBS_MASK": "off"}
    found = config.origins(environ, span_depth="chain")
    assert {name: place for name, place in found.items() if place != "the default"} == {
        "profile": "KVOBS_PROFILE", "mask": "KVOBS_MASK", "retention": str(file), "span_depth": "an option",
        "trace_sample": "the profile ci", "record_prompts": "the profile ci"}
    assert set(found) == {setting.name for setting in config.SETTINGS}


def test_doctor_shows_the_profile_and_the_origin_of_each_value(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command itself, with a profile and one setting that is not the profile's."""
    monkeypatch.setenv("KVOBS_PROFILE", "production")
    monkeypatch.setenv("KVOBS_RETENTION", "7d")
    assert main(["doctor", "--json"]) == 0
    found = {row["subject"]: row["reason"] for row in json.loads(capsys.readouterr().out)}
    assert found["profile"] == "The profile production is set (KVOBS_PROFILE); not by it: retention."
    assert {name: found[f"setting {name}"] for name in NAMES} == {
        "trace_sample": "1.5 % of new traces are recorded, and whatever a caller decided to record; an application's "
                        "own provider samples by its own rule (from the profile production).",
        "retention": "Stores and their rows are kept for 7d (from KVOBS_RETENTION).",
        "span_depth": "All spans of a turn are written (from the profile production).",
        "mask": "Credentials, personal data and payloads are masked on spans (from the profile production).",
        "record_prompts": "No prompts or replies are put on spans (from the profile production)."}


def test_doctor_without_a_profile_says_what_there_is() -> None:
    """Where none is set, doctor names the profiles; the standard's sampler is named with its value."""
    environ = {"OTEL_TRACES_SAMPLER": "always_off"}
    facts = {fact.subject: fact for fact in profile(load({}), config.origins({}), environ)}
    assert not facts["profile"].available
    assert facts["profile"].reason == "No profile is set; KVOBS_PROFILE takes production, staging, ci."
    assert facts["setting trace_sample"].reason == (
        "Traces are sampled by OTEL_TRACES_SAMPLER=always_off (from the default).")
    assert facts["setting retention"].reason == "Stores are kept until the bound on their size (from the default)."


def test_a_profile_that_is_none_is_refused_in_one_sentence(
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the sentence says what is allowed."""
    monkeypatch.setenv("KVOBS_PROFILE", "prod")
    assert main(["doctor"]) == 2
    assert "'prod'; allowed is production, staging, ci or off." in capsys.readouterr().err


def test_kvobs_run_gives_the_profile_to_the_command() -> None:
    """The option is the variable of the child; a profile that is none is refused before the child runs."""
    program = [sys.executable, "-c", "import os; print(os.environ['KVOBS_PROFILE'])"]
    kvobs = [sys.executable, "-m", "kvobs", "run", "--profile"]
    environment = child_environment(KVOBS_STORE="off", KVOBS_PROMETHEUS="off")
    done = run_child([*kvobs, "ci", "--", *program], env=environment)
    assert (done.returncode, done.stdout) == (0, "ci\n")
    done = run_child([*kvobs, "dev", "--", *program], env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'dev'" in done.stderr
