"""What a service promises: the ``[[slo]]`` tables of the config file.

An objective says which share (``target``) of events must be good. Of ``allocation_latency``, ``preemptions`` and
``out_of_memory`` an event is a window of ``window_s`` seconds in which there was something to judge; of
``time_to_first_token`` and ``time_per_output_token`` it is a turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kvobs.config._tables import refuse_unknown, tables_of

_UNITS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}
MOST = 32  # objectives: each keeps days of counts
# Latencies that are counted natively come by bucket, so an objective on them has one of these as its limit. The
# catalog's buckets are these too.
LATENCY_BOUNDS_NS = (1_000, 10_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 12_000_000, 25_000_000,
                     50_000_000, 100_000_000, 250_000_000, 500_000_000, 1_000_000_000, 2_500_000_000)

ALLOCATION_LATENCY, TTFT, TPOT = "allocation_latency", "time_to_first_token", "time_per_output_token"
PREEMPTIONS, OUT_OF_MEMORY = "preemptions", "out_of_memory"
SIGNALS = (ALLOCATION_LATENCY, TTFT, TPOT, PREEMPTIONS, OUT_OF_MEMORY)
LATENCIES = (ALLOCATION_LATENCY, TTFT, TPOT)
WINDOWED = (ALLOCATION_LATENCY, PREEMPTIONS, OUT_OF_MEMORY)
KEYS = {"name": "a short name", "signal": " or ".join(SIGNALS), "target": "a share below 1, such as 0.995 or 99.5%",
        "at_most": "a duration such as 12ms; of preemptions, a whole number",
        "quantile": "a share, such as 0.95 or 95%", "window": "whole seconds from 10s to 3600s"}


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """``target``: share of events that must be good. An event is good if at most ``at_most`` (ns, or preemptions) came
    of it; of a window of allocations, if at least the share ``quantile`` of them took at most ``at_most``.
    """

    name: str
    signal: str
    target: float
    at_most: int = 0
    quantile: float = 1.0
    window_s: int = 60

    @property
    def sentence(self) -> str:
        """What it promises, as a whole sentence."""
        share = f"{self.target:.6%}".rstrip("%").rstrip("0").rstrip(".") + " %"
        if self.signal in (TTFT, TPOT):
            return f"{share} of turns have a {self.signal.replace('_', ' ')} of at most {duration_text(self.at_most)}."
        windows = f"of windows of {self.window_s} s"
        if self.signal == ALLOCATION_LATENCY:
            return (f"In {share} {windows} with allocations, at least {self.quantile * 100:g} % of these took at most "
                    f"{duration_text(self.at_most)}.")
        if self.signal == PREEMPTIONS:
            return f"In {share} {windows} with work, at most {self.at_most} requests were preempted."
        return f"In {share} {windows} with work, no call ran out of memory."


# The article's (S9), judged per window as the design of kvobs has it.
ARTICLE = Objective(name="allocation-latency", signal=ALLOCATION_LATENCY, target=0.995, at_most=12 * 10**6,
                    quantile=0.95)


def parse_duration(text: str) -> int:
    """Nanoseconds of ``"12ms"``, ``"1.5 s"`` or ``"250us"``; ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(ns|us|ms|s)\s*", text)
    if match is None:
        raise ValueError(text)
    return round(float(match[1]) * _UNITS[match[2]])


def duration_text(ns: int) -> str:
    """The same as a text: ``"12 ms"``."""
    unit = next(unit for unit in ("s", "ms", "us", "ns") if ns >= _UNITS[unit] or unit == "ns")
    return f"{ns / _UNITS[unit]:g} {unit}"


def parse_share(value: str | float) -> float:
    """A share above 0 and below 1 of ``0.995``, ``"0.995"`` or ``"99.5 %"``; ValueError otherwise."""
    if isinstance(value, bool):
        raise ValueError(value)
    text = str(value).strip()
    share = round(float(text[:-1]) / 100, 12) if text.endswith("%") else float(text)
    if not 0 < share < 1:
        raise ValueError(value)
    return share


def parse_objectives(tables: object) -> tuple[Objective, ...]:
    """The objectives of a file's ``slo`` tables.

    Raises:
        ValueError: one clause that says which table, what is wrong and what is allowed.
    """
    found = [_objective(table, where) for table, where in tables_of("slo", tables, MOST)]
    names = [objective.name for objective in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two [[slo]] tables are named {twice[0]!r}")
    return tuple(found)


def _objective(table: Mapping[str, Any], where: str) -> Objective:
    refuse_unknown(table, KEYS, where)
    name = table.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,62}", name):
        raise ValueError(f"{where} needs a name of small letters, digits, '-', '_' and '.', at most 63")
    where = f"the [[slo]] {name!r}"
    signal = table.get("signal")
    if signal not in SIGNALS:
        raise ValueError(f"{where} has the signal {signal!r}; allowed are {', '.join(SIGNALS)}")
    for key, signals in (("at_most", (*LATENCIES, PREEMPTIONS)), ("quantile", (ALLOCATION_LATENCY,)),
                         ("window", WINDOWED)):
        if key in table and signal not in signals:
            raise ValueError(f"{where} has {key!r}, which means nothing for {signal}")
    return Objective(
        name=name, signal=signal, target=_value(table, "target", parse_share, where),
        at_most=_limit(table, signal, where),
        quantile=_value(table, "quantile", parse_share, where, 0.95) if signal == ALLOCATION_LATENCY else 1.0,
        window_s=_value(table, "window", _window, where, 60))


def _limit(table: Mapping[str, Any], signal: str, where: str) -> int:
    if signal == OUT_OF_MEMORY:
        return 0
    if signal == PREEMPTIONS:
        return int(_value(table, "at_most", _count, where, 0))
    limit = int(_value(table, "at_most", lambda value: parse_duration(str(value)), where))
    if signal == ALLOCATION_LATENCY and limit not in LATENCY_BOUNDS_NS:
        raise ValueError(f"{where} has at_most = {table['at_most']!r}; allocations are counted by bucket, so that "
                         f"allowed are {', '.join(duration_text(bound) for bound in LATENCY_BOUNDS_NS)}")
    return limit


def _value(table: Mapping[str, Any], key: str, parse: Any, where: str, default: Any = None) -> Any:
    if key not in table:
        if default is None:
            raise ValueError(f"{where} needs {key}: {KEYS[key]}")
        return default
    try:
        return parse(table[key])
    except (ValueError, TypeError):
        raise ValueError(f"{where} has {key} = {table[key]!r}; allowed is {KEYS[key]}") from None


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**9:
        raise ValueError(value)
    return value


def _window(value: object) -> int:
    seconds, rest = divmod(parse_duration(str(value)), 10**9)
    if rest or not 10 <= seconds <= 3600:
        raise ValueError(value)
    return seconds
