"""Profiles: what ``KVOBS_PROFILE`` sets at once. Each of these settings can still be set on its own, and then wins.

Rates and days are the article's (S18).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

DAY_S = 86_400
SAMPLER = "OTEL_TRACES_SAMPLER"  # the standard's own word on sampling; it wins over a profile
_UNITS_S = {"m": 60, "h": 3_600, "d": DAY_S}
LONGEST_S = 3_650 * DAY_S

PROFILES: dict[str, dict[str, Any]] = {
    "production": {"trace_sample": 1.5, "retention": 90 * DAY_S, "span_depth": "chain", "mask": "payloads",
                   "record_prompts": False},
    "staging": {"trace_sample": 15.0, "retention": 14 * DAY_S, "span_depth": "chain", "mask": "secrets",
                "record_prompts": True},
    "ci": {"trace_sample": 100.0, "retention": 3 * DAY_S, "span_depth": "edges", "mask": "secrets",
           "record_prompts": False},
}
PROFILED = tuple(PROFILES["ci"])


def of_profile(profile: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """What a profile sets in this environment; nothing for ``off``."""
    found = dict(PROFILES.get(profile, {}))
    if environ.get(SAMPLER, "").strip():
        found.pop("trace_sample", None)
    return found


def parse_sample(text: str) -> float | None:
    """Percent of ``"1.5%"``; None for ``auto``. The sign is demanded, as a bare 1 may mean a share. ValueError else."""
    word = text.strip()
    if word.lower() == "auto":
        return None
    if not word.endswith("%"):
        raise ValueError(text)
    value = float(word[:-1])
    if not 0 <= value <= 100:  # NaN is refused too
        raise ValueError(text)
    return value


def parse_retention(text: str) -> int:
    """Seconds of ``"14d"``, ``"36h"`` or ``"90m"``; 0 for ``off``. ValueError otherwise."""
    word = text.strip().lower()
    if word == "off":
        return 0
    match = re.fullmatch(r"(\d{1,9})\s*([mhd])", word, re.ASCII)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match is not None else 0
    if not 60 <= seconds <= LONGEST_S:
        raise ValueError(text)
    return seconds


def retention_text(seconds: int) -> str:
    """The text that ``parse_retention`` reads: ``"14d"``."""
    unit = next((unit for unit in ("d", "h") if seconds % _UNITS_S[unit] == 0), "m")
    return f"{seconds // _UNITS_S[unit]}{unit}" if seconds else "off"
