"""What Grafana would ask Prometheus for a board, and the answers: variables, intervals, queries, annotations."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = Any
ROUND = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
VARIABLE = re.compile(r"\$(?P<plain>\w+)|\$\{(?P<braced>\w+)(?::(?P<form>\w+))?\}|\[\[(?P<old>\w+)\]\]")
LABEL_VALUES = re.compile(r"label_values\((?:(?P<series>.+),\s*)?(?P<label>\w+)\)\s*$", re.DOTALL)
COLUMNS, GAP = 24, 8


class Prometheus:
    """The HTTP API of a Prometheus server, asked as its clients ask it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def get(self, path: str, **parameters: str) -> Json:
        """The data of an answer. Raises ValueError with Prometheus' own sentence where it refuses."""
        query = urllib.parse.urlencode({key.replace("match", "match[]"): value for key, value in parameters.items()})
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=60) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                body = error.read().decode(errors="replace")
            try:
                raise ValueError(json.loads(body)["error"]) from None
            except (json.JSONDecodeError, KeyError):
                raise ValueError(f"Prometheus answered {error.code}: {body[:200]}") from None


@dataclass(frozen=True)
class View:
    """How a board is looked at: from and to in unix seconds, values of variables, seconds between scrapes, pixels."""

    start: float
    end: float
    chosen: Mapping[str, Sequence[str]] = field(default_factory=dict)
    scrape_s: float = 15.0
    width: int = 1600


def rounded(seconds: float) -> float:
    """The next of Grafana's round intervals, in seconds; fractions stay below one second."""
    if seconds < 1:
        return max(0.1, round(seconds, 1))
    return float(next((step for step in ROUND if step >= seconds), ROUND[-1]))


def duration(seconds: float) -> str:
    """A duration as PromQL writes it."""
    return f"{round(seconds * 1000)}ms" if seconds % 1 else f"{round(seconds)}s"


def seconds_of(text: str | None) -> float:
    """Seconds of a duration such as ``30s``, ``>2m`` or ``500ms``; 0 of none and of a variable."""
    found = re.fullmatch(r"[<>]?\s*(\d+(?:\.\d+)?)(ms|s|m|h|d)", (text or "").strip())
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] if found else 0.0


def regex(values: Sequence[str]) -> str:
    """Values of a variable as Grafana writes them into a matcher of PromQL."""
    escaped = [re.sub(r"[\\^$*+?.()|\[\]{}]", lambda special: "\\\\" + special[0], value) for value in values]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})" if escaped else ""


class Board:
    """A board under a view, with its variables filled from a Prometheus server."""

    def __init__(self, board: Mapping[str, Json], view: View, prometheus: Prometheus) -> None:
        self.board, self.view, self.prometheus = board, view, prometheus
        self.texts: dict[str, str] = {}
        self.values: dict[str, str] = {}
        for variable in board.get("templating", {}).get("list", []):
            self._fill(variable)

    def _fill(self, variable: Mapping[str, Json]) -> None:
        name, kind = variable["name"], variable["type"]
        chosen = list(self.view.chosen.get(name, ()))
        if kind == "datasource":
            self.texts[name], self.values[name] = "Prometheus", "prometheus"
        elif kind in ("constant", "textbox", "custom", "interval") and not chosen:
            current = variable.get("current", {}).get("value") or str(variable.get("query", "")).split(",")[0]
            self.texts[name] = self.values[name] = str(current[0] if isinstance(current, list) else current)
        elif chosen:
            self.texts[name], self.values[name] = " + ".join(chosen), regex(chosen)
        else:
            found, saved = self._options(variable), variable.get("current", {}).get("value", [])
            kept = [one for one in (saved if isinstance(saved, list) else [saved]) if one in found]
            if kept:
                self.texts[name], self.values[name] = " + ".join(kept), regex(kept)
            elif variable.get("includeAll"):
                self.texts[name], self.values[name] = "All", variable.get("allValue") or regex(found)
            else:
                self.texts[name], self.values[name] = next(iter(found), "None"), regex(found[:1])

    def _options(self, variable: Mapping[str, Json]) -> list[str]:
        query = variable.get("query", "")
        text = query.get("query", "") if isinstance(query, dict) else query
        asked = LABEL_VALUES.fullmatch(self.filled(variable.get("definition") or text).strip())
        if asked is None:
            return []
        window = {"start": str(self.view.start), "end": str(self.view.end)}
        series = {"match": asked["series"]} if asked["series"] else {}
        return list(self.prometheus.get(f"label/{asked['label']}/values", **window, **series))

    def interval(self, panel: Mapping[str, Json], target: Mapping[str, Json] | None = None) -> float:
        """Seconds between two points of a panel."""
        column = (self.view.width - 32 + GAP) / COLUMNS
        points = panel.get("maxDataPoints") or max(100, int(panel["gridPos"]["w"] * column - GAP))
        least = max(seconds_of((target or {}).get("interval")) or seconds_of(panel.get("interval")), self.view.scrape_s)
        return max(rounded((self.view.end - self.view.start) / points), least)

    def filled(self, text: str, interval_s: float = 15.0) -> str:
        """A text with its variables replaced. Raises ValueError for one that the board does not define."""
        span = self.view.end - self.view.start
        built_in = {
            "__interval": duration(interval_s), "__interval_ms": str(round(interval_s * 1000)),
            "__rate_interval": duration(max(interval_s + self.view.scrape_s, 4 * self.view.scrape_s)),
            "__range": duration(round(span)), "__range_s": str(round(span)), "__range_ms": str(round(span * 1000)),
        }
        known = self.values | built_in

        def value(found: re.Match[str]) -> str:
            name = found["plain"] or found["braced"] or found["old"]
            if name not in known:
                raise ValueError(f"The board defines no variable {name}.")
            return self.texts[name] if found["form"] == "text" and name in self.texts else known[name]

        return VARIABLE.sub(value, text)

    def answer(self, panel: Mapping[str, Json], target: Mapping[str, Json]) -> dict[str, Json]:
        """What Prometheus says to one target: its result, exemplars where asked for, or an error."""
        step = self.interval(panel, target)
        try:
            query = self.filled(target["expr"], step)
            if target.get("instant") and not target.get("range"):
                return {"query": query, **self.prometheus.get("query", query=query, time=str(self.view.end))}
            window = self._window(step)
            found = {"query": query, **self.prometheus.get("query_range", query=query, step=str(step), **window)}
            if target.get("exemplar"):
                asked = self.prometheus.get("query_exemplars", query=query, **window)
                found["exemplars"] = [one for series in asked for one in series["exemplars"]]
            return found
        except (KeyError, ValueError) as error:
            return {"error": str(error)}

    def _window(self, step: float) -> dict[str, str]:
        start, end = (int(at / step) * step for at in (self.view.start, self.view.end))
        return {"start": f"{start:.3f}", "end": f"{end:.3f}"}

    def answers(self) -> dict[str, Json]:
        """The answers of all panels, by panel id and refId."""
        return {str(panel["id"]): {
            "interval": self.interval(panel) * 1000,
            "targets": {target["refId"]: self.answer(panel, target)
                        for target in panel.get("targets", []) if not target.get("hide")},
        } for panel in panels_of(self.board)}

    def annotations(self) -> list[dict[str, Json]]:
        """The board's annotations as events: points in time (ms), joined while not more than a step apart."""
        drawn = []
        for one in self.board.get("annotations", {}).get("list", []):
            expr = one.get("expr") or one.get("target", {}).get("expr")
            if not expr or not one.get("enable", True):
                continue
            step = max(seconds_of(one.get("step") or one.get("target", {}).get("interval")), self.view.scrape_s)
            data = self.prometheus.get("query_range", query=self.filled(expr, step), step=str(step),
                                       **self._window(step))
            events = [event for series in data["result"] for event in joined(series["values"], step)]
            drawn.append({"name": one["name"], "color": one.get("iconColor", "blue"), "events": events})
        return drawn


def joined(samples: Sequence[tuple[float, str]], step: float) -> list[dict[str, int]]:
    """Spans (ms) of consecutive samples that are neither zero nor absent."""
    events: list[dict[str, int]] = []
    for at, value in samples:
        if float(value) == 0:
            continue
        if events and at * 1000 - events[-1]["timeEnd"] <= step * 1000:
            events[-1]["timeEnd"] = round(at * 1000)
        else:
            events.append({"time": round(at * 1000), "timeEnd": round(at * 1000)})
    return events


def panels_of(board: Mapping[str, Json]) -> list[dict[str, Json]]:
    """All panels of a board with something in them, those inside collapsed rows too."""
    flat = [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", []))]
    return [panel for panel in flat if panel["type"] != "row"]


def drawing(board: Mapping[str, Json], view: View, prometheus: Prometheus, *, theme: str = "dark",
            caption: str = "") -> dict[str, Json]:
    """Everything that a picture of a board is made of, as the page in ``scripts/preview`` reads it."""
    filled = Board(board, view, prometheus)
    return {"board": board, "from": round(view.start * 1000), "to": round(view.end * 1000), "width": view.width,
            "theme": theme, "caption": caption, "variables": filled.texts, "answers": filled.answers(),
            "annotations": filled.annotations()}
