"""Policies as TOML: three ``[[level]]`` tables with a condition and times each, and what holds for all of them."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Collection, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvobs.breaker._conditions import SECOND, All, AnyOf, Condition, Leaf, leaves
from kvobs.breaker._signals import signal_named
from kvobs.breaker._states import Level, Policy
from kvobs.config import ConfigError, parse_duration

PRESETS = ("default", "article", "growing")
LEVELS = 3
MOST_LEAVES, MOST_DEPTH = 32, 8


class PolicyError(ConfigError):
    """A policy was refused; ``str()`` is one whole sentence."""


def load_policy(named: str) -> Policy:
    """A preset by its name, or the policy in a TOML file.

    Raises:
        PolicyError: one sentence: which file and table, what is wrong, what is allowed.
    """
    try:
        text = ((files("kvobs.breaker") / "presets" / f"{named}.toml") if named in PRESETS else Path(named)).read_text(
            encoding="utf-8")
    except FileNotFoundError:
        raise PolicyError(f"There is no policy {named!r}: it is neither a file nor one of the presets "
                          f"{', '.join(PRESETS)}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"The policy {named} cannot be read: {error}.") from None
    return parse_policy(text, named)


def parse_policy(text: str, where: str) -> Policy:
    """A policy from TOML. Raises as ``load_policy`` does."""
    try:
        table = tomllib.loads(text)
        levels = table.pop("level", None)
        if not isinstance(levels, list) or len(levels) != LEVELS or not all(isinstance(one, dict) for one in levels):
            raise ValueError(f"needs {LEVELS} tables headed [[level]]: reorganise, offload, degrade")
        _only(table, ("name", "caveat", "escalate", "transitions", "within", "gap", "jitter", "seed"), "the policy")
        plain = Policy(name="", levels=())
        return Policy(
            name=_text(table, "name"), caveat=_text(table, "caveat", ""),
            levels=tuple(_level(one, f"level {number}") for number, one in enumerate(levels, 1)),
            escalate_s=_seconds(table, "escalate", plain.escalate_s, "the policy"),
            transitions=_whole(table, "transitions", plain.transitions, 2 * LEVELS, 10_000, "the policy"),
            within_s=_seconds(table, "within", plain.within_s, "the policy"),
            gap_s=_seconds(table, "gap", plain.gap_s, "the policy"),
            jitter=_number(table, "jitter", plain.jitter, 0, 1, "the policy"),
            seed=_whole(table, "seed", plain.seed, 0, 2**32, "the policy"))
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"The policy {where} is not TOML: {error}.") from None
    except RecursionError:
        raise PolicyError(f"The policy {where} is nested too deeply.") from None
    except ValueError as error:
        raise PolicyError(f"In the policy {where}, {error}.") from None


def _level(table: Mapping[str, Any], where: str) -> Level:
    times = {"open": "open_s", "closed": "closed_s", "longest_open": "longest_open_s", "half_open": "half_open_s",
             "probe_every": "probe_every_s"}
    _only(table, ("any", "all", *times, "probes", "probes_needed"), where)
    condition = _condition({key: table[key] for key in ("any", "all") if key in table}, where, 0)
    if len(list(leaves(condition))) > MOST_LEAVES:
        raise ValueError(f"{where} names more than {MOST_LEAVES} signals")
    plain = Level(condition=condition)
    found = Level(condition=condition, probes=_whole(table, "probes", plain.probes, 1, 1000, where),
                  probes_needed=_whole(table, "probes_needed", plain.probes_needed, 1, 10**6, where),
                  **{field: _seconds(table, key, getattr(plain, field), where) for key, field in times.items()})
    if found.longest_open_s < found.open_s:
        raise ValueError(f"{where} has longest_open below open")
    return found


def _condition(table: object, where: str, depth: int) -> Condition:
    if not isinstance(table, dict):
        raise ValueError(f"{where} has a condition {table!r}; allowed are tables with any, all or signal")
    if depth > MOST_DEPTH:
        raise ValueError(f"{where} nests conditions deeper than {MOST_DEPTH}")
    kinds = [key for key in ("any", "all", "signal") if key in table]
    if len(kinds) != 1:
        raise ValueError(f"{where} needs one of any, all and signal, and has {' and '.join(kinds) or 'none'}")
    if kinds == ["signal"]:
        return _leaf(table, where)
    _only(table, kinds, where)
    parts = table[kinds[0]]
    if not isinstance(parts, list) or not parts:
        raise ValueError(f"{where} needs a list of conditions under {kinds[0]}")
    found = tuple(_condition(part, where, depth + 1) for part in parts)
    return AnyOf(found) if kinds == ["any"] else All(found)


def _leaf(table: Mapping[str, Any], where: str) -> Leaf:
    _only(table, ("signal", "above", "below", "one_of", "release", "for", "min_samples", "max_age"), where)
    signal = signal_named(_text(table, "signal"))
    where = f"{where}, {signal.name}"
    how = [key for key in ("above", "below", "one_of") if key in table]
    allowed = ["one_of"] if signal.words else ["above", "below"]
    if len(how) != 1 or how[0] not in allowed:
        raise ValueError(f"{where} needs {' or '.join(allowed)}, and has {' and '.join(how) or 'none'}")
    if "release" in table and signal.words:
        raise ValueError(f"{where} has a release, which means nothing for words")
    words = table.get("one_of", [])
    if signal.words and (not isinstance(words, list) or not words
                         or not all(word in signal.words for word in words if isinstance(word, str))
                         or not all(isinstance(word, str) for word in words)):
        raise ValueError(f"{where} is one of {words!r}; allowed are {', '.join(signal.words)}")
    found = Leaf(
        signal=signal.name, one_of=tuple(words),
        above=_number(table, "above", None, -math.inf, math.inf, where),
        below=_number(table, "below", None, -math.inf, math.inf, where),
        release=_number(table, "release", None, -math.inf, math.inf, where),
        for_s=_seconds(table, "for", 0.0, where), min_samples=_whole(table, "min_samples", 1, 1, 10**9, where),
        max_age_s=_seconds(table, "max_age", 10.0, where))
    wrong = found.release is not None and (
        (found.above is not None and found.release > found.above)
        or (found.below is not None and found.release < found.below))
    if wrong:
        raise ValueError(f"{where} has its release on the wrong side of {how[0]}")
    return found


# -- values ----------------------------------------------------------------------------------------------


def _only(table: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    for key in table:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            raise ValueError(f"{where} has no key {key!r}; "
                             + (f"did you mean {near[0]!r}?" if near else f"allowed are {', '.join(keys)}"))


def _text(table: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, and is {value!r}")
    return " ".join(value.split())


def _checked(table: Mapping[str, Any], key: str, default: Any, read: Callable[[Any], Any], allowed: str,
             where: str) -> Any:
    if key not in table:
        return default
    try:
        return read(table[key])
    except (ValueError, TypeError):
        raise ValueError(f"{where} has {key} = {table[key]!r}; allowed is {allowed}") from None


def _seconds(table: Mapping[str, Any], key: str, default: float, where: str) -> float:
    return float(_checked(table, key, default, lambda value: parse_duration(str(value)) / SECOND,
                          "a duration such as 2s or 500ms", where))


def _number(table: Mapping[str, Any], key: str, default: Any, low: float, high: float, where: str) -> Any:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(value)
        if not math.isfinite(value):
            raise ValueError(value)
        return float(value)

    return _checked(table, key, default, read, "a finite number" if math.isinf(high) else f"{low:g} to {high:g}", where)


def _whole(table: Mapping[str, Any], key: str, default: int, low: int, high: int, where: str) -> int:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(value)
        return value

    return int(_checked(table, key, default, read, f"a whole number from {low} to {high}", where))
