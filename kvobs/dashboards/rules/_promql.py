"""Selectors and counts as PromQL; a name or a label that the catalog does not have is refused."""

from __future__ import annotations

from kvobs.catalog import BY_NAME, prometheus_label, prometheus_name
from kvobs.slo import window_text

WHO = ("job", "instance")
LOOKBACK = "1h"  # how long a series may have been away and still be the same one


def metric(name: str, suffix: str = "", **matchers: str) -> str:
    """A selector of a metric's samples; a matcher that begins with ``~``, ``!`` or ``!~`` says its own operator.

    Raises:
        ValueError: the catalog has no such name, or the metric no such label; one sentence.
    """
    row = BY_NAME.get(name)
    if row is None:
        raise ValueError(f"The catalog has no metric {name!r}.")
    known = {prometheus_label(attribute) for attribute in row.attributes} | set(WHO)
    if unknown := sorted(matchers.keys() - known):
        raise ValueError(f"{name} has no label {unknown[0]!r}; it has {', '.join(sorted(known))}.")
    chosen = ", ".join(f"{label}{_matcher(value)}" for label, value in matchers.items())
    return prometheus_name(row) + suffix + (f"{{{chosen}}}" if chosen else "")


def _matcher(value: str) -> str:
    operator = next((sign for sign in ("!~", "!", "~") if value.startswith(sign)), "")
    written = {"": "=", "~": "=~", "!": "!=", "!~": "!~"}[operator]
    return f'{written}"{value.removeprefix(operator)}"'


def by(*labels: str) -> str:
    """``(job, instance, ...)``: what a result is told apart by."""
    return f"({', '.join((*WHO, *labels))})"


def total(expression: str, *labels: str) -> str:
    """The sum, told apart by job, instance and ``labels``."""
    return f"sum by {by(*labels)} ({expression})"


def increase(selector: str, seconds: int) -> str:
    """A counter's growth over a window; resets count as what was counted since."""
    return f"increase({selector}[{window_text(seconds)}])"


def grown(selector: str, seconds: int, *labels: str) -> str:
    """A counter's growth over a window, told apart by ``labels``, with what it had at its first sample.

    PromQL's ``increase`` misses the first event of a counter that is born with it, as those of kvobs are. Such a
    series is taken whole where it was not there in the hour before the window, and where its target was scraped well
    more often in the window than it was there; so the counts of a process that Prometheus has just met, or meets again
    after failed scrapes, are not taken for new. Without ``up`` (metrics that were pushed) only the growth is seen.
    """
    window = window_text(seconds)
    return (f"sum by {by(*labels)} (\n"
            f"  last_over_time({selector}[{window}])\n"
            f"  unless count_over_time({selector}[{LOOKBACK}] offset {window})\n"
            f"  and count_over_time({selector}[{window}])\n"
            f"    < on {by()} group_left max by {by()} (sum_over_time(up[{window}]))\n"
            f"  or increase({selector}[{window}])\n"
            ")")
