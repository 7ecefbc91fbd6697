"""Traces from Jaeger's query API, as its published description has it: what kvobs exported is what is printed."""

from __future__ import annotations

import copy
import json
import re
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

for _module in ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.common"):
    pytest.importorskip(_module, reason="The OpenTelemetry SDK is missing: pip install 'kvobs[otel]'.")
from opentelemetry.sdk.trace import ReadableSpan

from kvobs.cli import main
from kvobs.store import StoreWriter
from tests import otlp_traces
from tests.events import turn
from tests.served_page import Answer, Page, served, text
from tests.support import ROOT

PUBLISHED = ROOT.parent / "shared" / "schemas" / "jaeger" / "query_service_v3.openapi.yaml"
ROUTE = "/api/v3/traces/{traceId}"


@pytest.fixture(scope="module")
def published() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is missing: pip install pyyaml.")
    if not PUBLISHED.exists():
        pytest.skip("The published description of Jaeger's API is not beside this repository.")
    found: dict[str, Any] = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def validate(published: dict[str, Any]) -> Callable[[str, Any], None]:
    """Refuses what the description of a status does not allow, unknown fields included."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is missing: pip install jsonschema.")
    components = copy.deepcopy(published["components"])
    for schema in components["schemas"].values():
        if schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)

    def check(status: str, document: Any) -> None:
        answer = published["paths"][ROUTE]["get"]["responses"][status]
        schema = answer["content"]["application/json"]["schema"]
        jsonschema.validate(document, {**schema, "components": components}, cls=jsonschema.Draft4Validator)

    return check


@pytest.fixture(scope="module")
def exported() -> list[ReadableSpan]:
    return otlp_traces.exported()


def run(capsys: pytest.CaptureFixture[str], page: Page, *arguments: str) -> tuple[int, str, str]:
    code = main(["trace", *arguments, "--jaeger", page.url])
    return code, *capsys.readouterr()


def routed(**answers: Answer) -> Answer:
    """Answers by the beginning of the path: ``v3`` and ``legacy``; a path without one is a 404."""
    def answer(request: BaseHTTPRequestHandler) -> None:
        kind = "v3" if request.path.startswith("/api/v3/traces/") else "legacy"
        answers.get(kind, text("404 page not found", 404))(request)

    return answer


def spans_as_exported(exported: list[ReadableSpan], unit_ns: int = 1) -> set[tuple[Any, ...]]:
    """Of each span: id, parent, name, start and duration in the unit, and its events with their times."""
    return {(otlp_traces.span_id(span), f"{span.parent.span_id:016x}" if span.parent else None, span.name,
             (span.start_time or 0) // unit_ns, (span.end_time or 0) // unit_ns - (span.start_time or 0) // unit_ns,
             tuple((event.name, event.timestamp // unit_ns) for event in span.events)) for span in exported}


def spans_as_told(document: dict[str, Any], unit_ns: int = 1) -> set[tuple[Any, ...]]:
    spans = document["spans"]
    return {(span["span_id"], None if span["parent"] is None else spans[span["parent"]]["span_id"], span["name"],
             span["start_ns"] // unit_ns, span["duration_ns"] // unit_ns,
             tuple((event["name"], event["t_ns"] // unit_ns) for event in span["events"])) for span in spans}


@pytest.mark.parametrize("as_hex", [False, True], ids=["base64", "hex"])
def test_json_tells_what_was_exported(exported: list[ReadableSpan], validate: Callable[[str, Any], None], as_hex: bool,
                                      published: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """From an answer that the description validates come exactly the exported spans, parents, times and events."""
    document = otlp_traces.v3(exported, as_hex=as_hex)
    validate("200", document)
    with served(routed(v3=text(otlp_traces.envelope(document)))) as page:
        code, out, err = run(capsys, page, otlp_traces.trace_id(exported), "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert spans_as_told(told) == spans_as_exported(exported)
    assert len(told["spans"]) == len(exported) == 8
    assert {span["service"] for span in told["spans"]} == {"chat"}
    ((asked, _),) = page.asked
    path, _, query = asked.partition("?")
    assert path == ROUTE.format(traceId=otlp_traces.trace_id(exported))
    known = {one["name"] for one in published["paths"][ROUTE]["get"]["parameters"] if one["in"] == "query"}
    assert urllib.parse.parse_qs(query).keys() <= known
    assert query == "rawTraces=true"


def test_the_answer_may_come_in_parts(exported: list[ReadableSpan], validate: Callable[[str, Any], None],
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """A stream of envelopes, one a line, is one trace."""
    parts = [otlp_traces.v3(exported[:4]), otlp_traces.v3(exported[4:])]
    for part in parts:
        validate("200", part)
    with served(routed(v3=text(otlp_traces.envelope(*parts)))) as page:
        out = run(capsys, page, otlp_traces.trace_id(exported), "--json")[1]
    assert spans_as_told(json.loads(out)) == spans_as_exported(exported)


SIZES = {"s": 10**9, "ms": 10**6, "µs": 10**3, "ns": 1}
LINE = re.compile(r"\s*([+-][\d.,]+) (s|ms|µs|ns)(?:\s+([\d.,]+) (s|ms|µs|ns))?  (\W*)(.*)")


def printed(lines: list[str]) -> list[tuple[str, str | None, float, float, float]]:
    """Of each printed span: name, its parent's by indentation, offset and duration, and what rounding may take."""
    found: list[tuple[str, str | None, float, float, float]] = []
    above: list[tuple[int, str]] = []
    for line in lines:
        match = LINE.fullmatch(line)
        assert match is not None, line
        if match[3] is None:
            continue  # an event
        name, depth = match[6].removesuffix(" [chat]").partition(" failed: ")[0], len(match[5])
        above = [one for one in above if one[0] < depth]
        offset, took = (float(match[at].replace(",", "")) * SIZES[match[at + 1]] for at in (1, 3))
        found.append((name, above[-1][1] if above else None, offset, took,
                      0.0005 * max(SIZES[match[2]], SIZES[match[4]])))
        above.append((depth, name))
    return found


def test_the_tree_tells_what_was_exported(exported: list[ReadableSpan], capsys: pytest.CaptureFixture[str]) -> None:
    """Each printed line has the name, offset, duration and parent of an exported span; events stand below theirs."""
    with served(routed(v3=text(otlp_traces.envelope(otlp_traces.v3(exported))))) as page:
        code, out, _ = run(capsys, page, otlp_traces.trace_id(exported))
    title, *lines, link = out.splitlines()
    assert (code, link) == (0, f"{page.url}/trace/{otlp_traces.trace_id(exported)}")
    assert title == (f"Trace {otlp_traces.trace_id(exported)}: 8 spans, 5.507 s, from Jaeger at {page.url} (API v3).")
    names = {span.context.span_id: span.name for span in exported if span.context}
    begin = min(span.start_time or 0 for span in exported)
    expected = sorted((span.name, names[span.parent.span_id] if span.parent else None, (span.start_time or 0) - begin,
                       (span.end_time or 0) - (span.start_time or 0)) for span in exported)
    shown = sorted(printed(lines))
    assert [one[:2] for one in shown] == [one[:2] for one in expected]
    for (*_, offset, took, error), (*_, real_offset, real) in zip(shown, expected, strict=True):
        assert abs(offset - real_offset) <= error
        assert abs(took - real) <= error
    assert "  +257.000 ms               │  │  • kvobs.migration src=cpu dst=meta bytes=64" in lines
    assert sum("•" in line for line in lines) == sum(len(span.events) for span in exported) == 3
    assert r"failed: no room\x1b[2J" in out
    assert "\x1b" not in out


@pytest.mark.parametrize("v3", [text("404 page not found", 404), text("<!doctype html><html></html>"),
                                text("", 501)], ids=["404", "a page of the UI", "501"])
def test_the_older_api_is_asked_where_the_newer_is_not_there(exported: list[ReadableSpan], v3: Answer,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    """Without an API v3 the trace comes from the older one, in microseconds, as is said."""
    with served(routed(v3=v3, legacy=text(json.dumps(otlp_traces.legacy(exported))))) as page:
        code, out, err = run(capsys, page, otlp_traces.trace_id(exported), "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert spans_as_told(told, 1_000) == spans_as_exported(exported, 1_000)
    assert told["notes"] == ["Times of the older API are whole microseconds."]
    assert sum(span["error"] is not None for span in told["spans"]) == 1


def test_a_trace_that_is_not_there_is_one_sentence(validate: Callable[[str, Any], None],
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """A 404 as the description has it is exit code 2 and a sentence that names Jaeger and the trace."""
    document = {"code": 5, "message": "trace not found", "details": []}
    validate("default", document)
    with served(routed(v3=text(json.dumps(document), 404))) as page:
        assert run(capsys, page, "ab" * 16) == (
            2, "", f"kvobs: The Jaeger at {page.url} has no trace {'ab' * 16}.\n")


def test_the_store_tells_of_a_turn_what_was_exported(exported: list[ReadableSpan], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """The turn, its prefill and its decode have in the store the names, times and parent of the exported spans."""
    wanted = otlp_traces.trace_id(exported)
    own = next(span for span in exported if span.name == "text_completion tiny" and span.status.is_unset)
    parts = [own, *(span for span in exported if span.name in ("prefill", "decode"))]
    writer = StoreWriter(tmp_path / "store", 64 * 1024**2, "p")
    writer.write([turn(trace_id=wanted, span_id=otlp_traces.span_id(own))])
    writer.close()
    assert main(["trace", wanted, "--store", str(tmp_path / "store"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["spans"]
    assert [(one["name"], one["start_ns"], one["duration_ns"]) for one in told] == [
        (span.name, span.start_time, (span.end_time or 0) - (span.start_time or 0)) for span in parts]
    assert [one["parent"] for one in told] == [None, 0, 0]
    assert told[0]["span_id"] == otlp_traces.span_id(own)
