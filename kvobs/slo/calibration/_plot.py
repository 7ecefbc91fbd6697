"""The plot of the report as SVG: observed rate and upper bound over the threshold, and the rate that is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from kvobs.slo.calibration._calibration import Calibration, share_text

_WIDTH, _HEIGHT = 900, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 76, 50


def plot(found: Calibration) -> str:
    """The plot, of a calibration that tested at least one threshold."""
    tested = found.tested
    alpha = found.question.alpha
    low, high = tested[0].threshold, tested[-1].threshold
    if low == high:
        low, high = low - 0.5, high + 0.5
    top = min(max(2 * alpha, *(one.upper_bound for one in tested)) * 1.05, 1.0)

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM)

    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(_described(found))}">']
    if found.threshold is not None:
        parts.append(f'<rect class="kept" x="{_LEFT}" y="{_TOP}" width="{max(x(found.threshold) - _LEFT, 1):.1f}" '
                     f'height="{floor - _TOP}"/>')
    parts.append(f'<path class="frame" d="M{_LEFT} {_TOP}V{floor}H{right}"/>')
    parts += [f'<text x="{x(tick):.1f}" y="{floor + 18}" text-anchor="middle">{tick:g}</text>'
              for tick in ticks(low, high)]
    parts += [f'<text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{share_text(tick)}</text>'
              for tick in ticks(0, top)]
    parts.append(f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">'
                 f"{escape(found.question.signal)} at most</text>")
    parts.append(f'<path class="limit" d="M{_LEFT} {y(alpha):.1f}H{right}"/>')
    for name, values in (("rate", [one.rate for one in tested]), ("bound", [one.upper_bound for one in tested])):
        line = "L".join(f"{x(one.threshold):.1f} {y(min(value, top)):.1f}"
                        for one, value in zip(tested, values, strict=True))
        parts.append(f'<path class="{name}" d="M{line}"/>')
    parts += _choices(found, x, floor)
    parts += _legend(share_text(alpha))
    return "\n".join(parts) + "\n</svg>"


def ticks(low: float, high: float) -> Sequence[float]:
    """Round numbers from low to high, 3 to 9 of them."""
    raw = (high - low) / 6
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _choices(found: Calibration, x: Callable[[float], float], floor: float) -> list[str]:
    parts = []
    for number, choice in enumerate(found.choices):
        if choice.threshold is None:
            continue
        at = x(choice.threshold)
        if not _LEFT <= at <= _WIDTH - _RIGHT:
            continue
        height = _TOP - 4 - 14 * number
        end = at > _WIDTH / 2
        parts.append(f'<path class="choice" d="M{at:.1f} {height}V{floor}"/><text x="{at + (-4 if end else 4):.1f}" '
                     f'y="{height + 4}" text-anchor="{"end" if end else "start"}">{escape(choice.method)}</text>')
    return parts


def _legend(allowed: str) -> list[str]:
    words = (("rate", "observed rate"), ("bound", "exact upper bound"), ("limit", f"allowed ({allowed})"))
    return [f'<path class="{name}" d="M{_LEFT + 190 * index} 14h28"/>'
            f'<text x="{_LEFT + 190 * index + 34}" y="18">{escape(text)}</text>'
            for index, (name, text) in enumerate(words)]


def _described(found: Calibration) -> str:
    return f"Share of windows that miss, by threshold of {found.question.signal}. {found.sentence}"
