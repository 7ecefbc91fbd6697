"""The report as one HTML page: a plot, tables, no script; light and dark as the reader's system is."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from kvobs.config import duration_text
from kvobs.slo.calibration._calibration import Calibration, share_text
from kvobs.slo.calibration._plot import plot
from kvobs.slo.calibration._text import CHOICE_COLUMNS, choice_rows, counted

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --raised: #f4f5f7; --ink: #1a1d21; --quiet: #50565e;
  --rule: #c9ced6; --rate: #0b57a4; --bound: #a8500b; --limit: #a81c1c; --kept: #e3f1e8; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --raised: #1e2226; --ink: #eceff2; --quiet: #b3bac2;
  --rule: #434a52; --rate: #7fbdf5; --bound: #f0a860; --limit: #ff9b94; --kept: #1d3326; } }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 1.25rem 1.5rem 3rem; }
h1 { font-size: 1.4rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 1.75rem 0 .4rem; border-bottom: 1px solid var(--rule); }
p { margin: .3rem 0 .6rem; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); }
.warned { border-left: .35rem solid var(--limit); background: var(--raised); padding: .5rem .9rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.frame { stroke: var(--rule); fill: none; }
.kept { fill: var(--kept); }
.rate { stroke: var(--rate); stroke-width: 2; fill: none; }
.bound { stroke: var(--bound); stroke-width: 2; stroke-dasharray: 6 4; fill: none; }
.limit { stroke: var(--limit); stroke-width: 1.5; fill: none; }
.choice { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 2 3; fill: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); }
th { color: var(--quiet); }
th, td:not(:last-child) { white-space: nowrap; }
pre { background: var(--raised); padding: .6rem .9rem; overflow-x: auto; }
"""


def page(found: Calibration, notes: Sequence[str], line: str) -> str:
    """The report as HTML.

    Args:
        found: what was found.
        notes: sentences about where the data came from.
        line: the policy's condition; empty where it abstained.
    """
    question = found.question
    style_hash = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode("ascii")
    title = f"Calibration of {question.signal} against {question.latency}"
    warned = found.drift is not None and found.drift.found
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="quiet">{escape(_asked(found))}</p>',
        _paragraph(found.sentence, found.threshold is None),
        _paragraph(found.drift.sentence, warned) if found.drift is not None else "",
        _paragraph(found.neighbours.sentence, found.neighbours.grow),
        *(_paragraph(note) for note in notes),
        "<h2>Misses by threshold</h2>", *_drawn(found),
        "<h2>What other methods would choose</h2>",
        _table(CHOICE_COLUMNS, choice_rows(found)),
        *(["<h2>For a breaker's policy</h2>", f"<pre>{escape(line)}</pre>"] if line else []),
    ]
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
            f"'sha256-{style_hash}'\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>\n"
            + "\n".join(part for part in body if part) + "\n</main></body></html>\n")


def _asked(found: Calibration) -> str:
    question = found.question
    return (f"Asked: the largest threshold at or below which at most {share_text(question.alpha)} of windows miss "
            f"{duration_text(question.slo_ns)}, with confidence {share_text(1 - question.delta)}. " + counted(found))


def _paragraph(text: str, warned: bool = False) -> str:
    return f'<p class="{"warned" if warned else "said"}">{escape(text)}</p>'


def _drawn(found: Calibration) -> list[str]:
    if not found.tested:
        return ["<p>There are too few windows to test a threshold.</p>"]
    rows = [(f"{one.threshold:.6g}", str(one.windows), str(one.misses), share_text(one.rate),
             share_text(one.upper_bound), f"{one.p_value:.3g}", "accepted" if one.accepted else "")
            for one in found.tested]
    names = ("threshold", "windows", "misses", "rate", "upper bound", "p-value", "")
    return [plot(found),
            '<p class="quiet">The upper bound is exact for each threshold alone. Testing from the lowest up until one '
            "fails is what makes the confidence hold for the one that is chosen.</p>",
            f"<details><summary>All {len(rows)} tested thresholds</summary>{_table(names, rows)}</details>"]


def _table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
