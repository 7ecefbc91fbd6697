"""Words that the table, the page and the policy share."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from kvobs.config import duration_text
from kvobs.slo.calibration._calibration import Calibration, share_text

_LONGEST = 63  # letters of an application's own signal, behind "app."
CHOICE_COLUMNS = ("method", "threshold", "windows", "misses", "rate", "")


def choice_rows(found: Calibration) -> Sequence[tuple[str, ...]]:
    """What each method would choose and the rate that the data show for it, under ``CHOICE_COLUMNS``."""
    return [(choice.method, "none" if choice.threshold is None else f"{choice.threshold:.6g}",
             "" if choice.windows is None else str(choice.windows),
             "" if choice.misses is None else str(choice.misses),
             "" if choice.rate is None else share_text(choice.rate), choice.note) for choice in found.choices]


def counted(found: Calibration) -> str:
    """What the data were, as a whole sentence."""
    return (f"{found.samples:,} samples ({found.absent:,} lack the signal or the latency) made {found.windows:,} "
            f"windows of {duration_text(found.question.window_ns)} with both ({found.incomplete:,} with one of them "
            f"are left out); in {found.misses:,} the latency was above {duration_text(found.question.slo_ns)}.")


def breaker_name(signal: str, known: Collection[str]) -> str:
    """The name under which a policy can have a signal: its own where the breaker knows it, else ``app.NAME``."""
    if signal in known:
        return signal
    letters = re.sub(r"[^a-z0-9_]+", "_", signal.lower().removeprefix("app.")).strip("_")
    return "app." + (letters if letters[:1].isalpha() else f"signal_{letters}").rstrip("_")[:_LONGEST]


def fragment(signal: str, threshold: float) -> str:
    """The condition of a breaker's policy that holds above a threshold, as TOML; every digit of it is kept."""
    return f'{{ signal = "{signal}", above = {threshold!r} }}'
