"""A log-log plot as an SVG, for what should be a straight line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 360, 70, 40, 20
_COLOURS = ("#0b6e4f", "#b23a48", "#33658a")
Series = Mapping[str, Sequence[tuple[float, float]]]


def write_svg(path: Path, title: str, across: str, up: str, series: Series) -> None:
    """Draw each series of positive (x, y) with its points joined; the axes have a line per power of ten."""
    points = [point for line in series.values() for point in line]
    columns, rows = _decades([x for x, _ in points]), _decades([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        return (LEFT + (WIDTH - LEFT - 20) * _share(x, columns),
                HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * _share(y, rows))

    middle = HEIGHT // 2
    parts = [f'<text x="{LEFT}" y="14">{title}</text>',
             f'<text x="{WIDTH // 2}" y="{HEIGHT - 6}" text-anchor="middle">{across}</text>',
             f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">{up}</text>']
    for power in range(columns[0], columns[1] + 1):
        x, low = place(10.0 ** power, 10.0 ** rows[0])
        parts.append(f'<path d="M{x:.1f} {low:.1f}V{TOP}" stroke="#ddd"/><text x="{x:.1f}" y="{low + 14:.1f}" '
                     f'text-anchor="middle">1e{power}</text>')
    for power in range(rows[0], rows[1] + 1):
        _, y = place(10.0 ** columns[0], 10.0 ** power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 20}" stroke="#ddd"/><text x="{LEFT - 6}" y="{y + 4:.1f}" '
                     f'text-anchor="end">1e{power}</text>')
    for (name, line), colour in zip(series.items(), _COLOURS, strict=False):
        placed = [place(x, y) for x, y in line]
        joined = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        x, y = placed[-1]
        parts.append(f'<text x="{x - 8:.1f}" y="{y - 8:.1f}" text-anchor="end" fill="{colour}">{name}</text>')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
                    f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n',
                    encoding="utf-8")


def slope(line: Sequence[tuple[float, float]]) -> float:
    """The exponent of growth: the least-squares slope of log y over log x."""
    xs, ys = ([math.log(value) for value in values] for values in zip(*line, strict=True))
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return (sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
            / sum((x - middle_x) ** 2 for x in xs))


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values)) + 0.05), math.ceil(math.log10(max(values)) - 0.05)
    return low, max(high, low + 1)


def _share(value: float, decades: tuple[int, int]) -> float:
    return (math.log10(value) - decades[0]) / (decades[1] - decades[0])
