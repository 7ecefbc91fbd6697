"""A board with fixed answers of Prometheus, for which the test knows what must be on the picture."""

from __future__ import annotations

from typing import Any

START, STEP, POINTS = 1_700_000_000, 15, 40
END = START + STEP * (POINTS - 1)
TIMES = [START + STEP * number for number in range(POINTS)]


def matrix(*series: tuple[dict[str, str], list[float | None]]) -> dict[str, Any]:
    """The answer of a range query; None is a point that is absent."""
    return {"resultType": "matrix", "result": [
        {"metric": labels, "values": [[at, str(value)] for at, value in zip(TIMES, values, strict=True)
                                      if value is not None]} for labels, values in series]}


def vector(*series: tuple[dict[str, str], float]) -> dict[str, Any]:
    """The answer of an instant query."""
    return {"resultType": "vector", "result": [{"metric": labels, "value": [END, str(value)]}
                                               for labels, value in series]}


def exemplars(*values: float) -> dict[str, Any]:
    """Exemplars in the middle of the time, to stand beside the result of an answer."""
    return {"exemplars": [{"labels": {"trace_id": f"{number:032x}"}, "value": str(value), "timestamp": TIMES[20] + 0.5}
                          for number, value in enumerate(values)]}


class Sample:
    """Panels with their answers, in a grid of three columns."""

    def __init__(self) -> None:
        self.panels: list[dict[str, Any]] = []
        self.answers: dict[str, Any] = {}

    def add(self, kind: str, title: str, answers: list[dict[str, Any]], *, options: dict[str, Any] | None = None,
            defaults: dict[str, Any] | None = None, targets: list[dict[str, Any]] | None = None, **more: Any) -> int:
        """One panel; its number."""
        number = len(self.panels)
        refs = [chr(ord("A") + place) for place in range(len(answers))]
        given = targets or [{}] * len(answers)
        self.panels.append({
            "id": number, "type": kind, "title": title, "description": f"What does {title} answer?",
            "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8}, "options": options or {},
            "fieldConfig": {"defaults": defaults or {}, "overrides": more.pop("overrides", [])},
            "targets": [{"refId": ref, "expr": f"query_{ref}", **target}
                        for ref, target in zip(refs, given, strict=True)], **more})
        self.answers[str(number)] = {"interval": STEP * 1000, "targets": dict(zip(refs, answers, strict=True))}
        return number

    def drawing(self, **more: Any) -> dict[str, Any]:
        """What the page is given."""
        return {"board": {"title": "Sample", "panels": self.panels}, "answers": self.answers, "variables": {},
                "from": START * 1000, "to": END * 1000, "width": 1400, "theme": "dark", "annotations": [], **more}


def level(value: float) -> list[float | None]:
    """The same value at all times."""
    return [value] * POINTS


def everything() -> dict[str, Any]:
    """One panel of every kind, by title."""
    sample = Sample()
    sample.add("stat", "Used", [matrix(({}, level(1.5 * 2**30)))], defaults={"unit": "bytes"})
    sample.add("stat", "Latency", [vector(({}, 0.012))], defaults={"unit": "s"})
    sample.add("stat", "Objective", [vector(({}, 0.995))], defaults={"unit": "percentunit"})
    sample.add("stat", "Nothing lost", [vector(({}, 0))], defaults={"unit": "short", "noValue": "not reported"})
    sample.add("stat", "Absent", [vector()], defaults={"unit": "bytes", "noValue": "no device here"})
    sample.add("stat", "Level", [vector(({}, 2))], defaults={"mappings": [
        {"type": "value", "options": {"2": {"text": "offload", "color": "orange", "index": 0}}}]})
    gap = [None if 10 <= place < 20 else float(place) * 2**20 for place in range(POINTS)]
    ranks = matrix(({"rank": "0"}, gap), ({"rank": "1"}, level(3 * 2**20)))
    sample.add("timeseries", "Two ranks", [ranks | exemplars(5 * 2**20, 30 * 2**20, 2**40)],
               targets=[{"legendFormat": "rank {{rank}}"}], defaults={"unit": "bytes"})
    sample.add("timeseries", "Absent series", [matrix()], defaults={"unit": "s", "noValue": "needs a breaker"})
    sample.add("timeseries", "Shares", [matrix(({"rank": "0"}, level(0.25))), matrix(({}, level(0.5)))],
               targets=[{"legendFormat": "used"}, {"legendFormat": "limit"}],
               defaults={"unit": "percentunit", "min": 0, "max": 1},
               overrides=[{"matcher": {"id": "byName", "options": "limit"},
                           "properties": [{"id": "displayName", "value": "the limit"}]}])
    out, back = {"src": "gpu:0", "dst": "host"}, {"src": "host", "dst": "gpu:0"}
    sample.add("table", "Moves", [vector((out, 3 * 2**20), (back, 0)), vector((out, 0.25))],
               targets=[{"format": "table", "instant": True}] * 2,
               overrides=[{"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}
                          for name, unit in (("moved", "bytes"), ("took", "s"))],
               transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": {
                   "excludeByName": {"Time": True}, "renameByName": {"Value #A": "moved", "Value #B": "took"}}}])
    sample.add("bargauge", "Pools", [vector(({"pool": "small"}, 0.2), ({"pool": "large"}, 0.85))],
               targets=[{"legendFormat": "{{pool}}"}], defaults={"unit": "percentunit", "min": 0, "max": 1},
               options={"orientation": "horizontal", "displayMode": "basic"})
    sample.add("text", "Words", [], options={"mode": "markdown", "content": "Read **this** first."})
    buckets = matrix(({"le": "0.001"}, level(1)), ({"le": "0.012"}, level(1)), ({"le": "+Inf"}, level(5)))
    sample.add("heatmap", "Buckets", [buckets | exemplars(0.0005, 0.011, 7)],
               targets=[{"format": "heatmap", "legendFormat": "{{le}}"}],
               options={"yAxis": {"unit": "s"}, "cellValues": {"unit": "short"}},
               overrides=[{"matcher": {"id": "byName", "options": "0.012"},
                           "properties": [{"id": "displayName", "value": "SLO 12 ms"}]}])
    states = [float(place >= 20) for place in range(POINTS)]
    sample.add("state-timeline", "Breaker", [matrix(({"device": "0"}, states))],
               targets=[{"legendFormat": "device {{device}}"}], defaults={"mappings": [
                   {"type": "value", "options": {"0": {"text": "normal", "color": "green", "index": 0},
                                                 "1": {"text": "reorganise", "color": "yellow", "index": 1}}}]})
    sample.add("barchart", "Where memory is",
               [vector(({"place": "0"}, 6 * 2**30)), vector(({"place": "0"}, 2 * 2**30))],
               targets=[{"format": "table", "instant": True}] * 2, defaults={"unit": "bytes"},
               options={"xField": "place", "orientation": "horizontal", "stacking": "normal"},
               transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": {
                   "excludeByName": {"Time": True},
                   "renameByName": {"Value #A": "tensors", "Value #B": "unexplained"}}}])
    return sample.drawing(annotations=[{"name": "orders", "color": "orange", "events": [
        {"time": TIMES[12] * 1000, "timeEnd": TIMES[16] * 1000}]}])
