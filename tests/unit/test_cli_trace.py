"""``kvobs trace``: what it refuses, and traces from the store; Jaeger's answers are in the contract tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from kvobs import model
from kvobs.bridge import _fetch
from kvobs.cli import main
from kvobs.cli.traces import TraceError, fetch
from kvobs.store import StoreReader, StoreWriter, last_traced, turns_of_trace
from tests.events import ORIGIN, origin, turn
from tests.served_page import Answer, served, text
from tests.support import free_port

ID, SPAN, OTHER = "ab" * 16, "cd" * 8, "ef" * 16
WALL = 1_700_000_000_000_000_000


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main(["trace", *arguments])
    return code, *capsys.readouterr()


def write(directory: Path, *events: model.Event) -> Path:
    writer = StoreWriter(directory, 64 * 1024**2, "p", clock=lambda: 0, wall=lambda: WALL)
    writer.write(list(events))
    writer.close()
    return directory


def traced(trace: str = ID, **fields: object) -> model.Turn:
    return turn(trace_id=trace, span_id=SPAN, **fields)


@pytest.mark.parametrize(("arguments", "sentence"), [
    ([], "Name a trace, or ask for the newest one with --last, and not both"),
    ([ID, "--last"], "Name a trace, or ask for the newest one with --last, and not both"),
    (["xyz"], "The trace's id is 'xyz'; allowed are 32 hexadecimal digits, or 16, not all of them 0"),
    (["0" * 32], "not all of them 0"),
    ([ID + "0"], "allowed are 32 hexadecimal digits"),
    (["../../../../x"], "allowed are 32 hexadecimal digits"),
    (["\x1b[2J" + "a" * 9_000], r"The trace's id is '\x1b[2Jaaa"),
    (["٣" * 32], "allowed are 32 hexadecimal digits"),
    ([ID, "--jaeger", "nonsense"], "The setting 'jaeger_url' given explicitly is 'nonsense'"),
    ([ID, "--jaeger", "http://user:secret@h"], "The address of h holds credentials, which are not supported"),
    ([ID, "--jaeger", "off", "--store", "/nowhere"], "There is no store at /nowhere"),
    ([ID], "There is no store at "),
    ([ID, "--spans", "-1"], "Invalid value for '--spans'"),
])
def test_what_cannot_be_meant_is_refused(arguments: list[str], sentence: str,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one sentence on stderr, nothing on stdout."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert len(err) < 400
    assert "secret" not in err


def test_a_store_that_is_off_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a store and a Jaeger there is nothing to read, and the sentence names both ways out."""
    monkeypatch.setenv("KVOBS_STORE", "off")
    assert run(capsys, ID) == (2, "", "kvobs: The store is off in this configuration; name one with --store, or a "
                                      "Jaeger with --jaeger URL.\n")
    assert run(capsys, "--last")[2] == ("kvobs: The store is off in this configuration; name one with --store, or a "
                                        "trace and a Jaeger.\n")


def test_a_jaeger_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection is exit code 2 and says who cannot be reached."""
    port = free_port()
    assert run(capsys, ID, "--jaeger", f"http://127.0.0.1:{port}") == (
        2, "", f"kvobs: 127.0.0.1:{port}/api/v3/traces/{ID} cannot be reached (connection refused).\n")


def short(request: BaseHTTPRequestHandler) -> None:
    text(b"{", Content_Length="500")(request)


@pytest.mark.parametrize(("answer", "sentence"), [
    (text("nothing", 404), "The Jaeger at {} has no trace " + ID),
    (text('{"result": {}}'), "The Jaeger at {} has no trace " + ID),
    (text("oh", 503), "answered 503, not 200"),
    (text("<html>"), "is no answer of Jaeger: it is not a trace of the API v3: JSON is malformed"),
    (text(""), "is no answer of Jaeger"),
    (text("[1]"), "Expected `object`, got `array`"),
    (text('{"data": [], "errors": null}'), "neither result nor resourceSpans is in it"),
    (text('{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "' + OTHER + '"}]}]}]}'),
     "is another trace than " + ID),
    (text('{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "??"}]}]}]}'), "is no answer of Jaeger"),
    (text('{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "-1"}]}]}]}'),
     "a time that is no whole number"),
    (text('{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": 99999999999999999999}]}]}]}'),
     "is no answer of Jaeger"),
    (text('{"resourceSpans": 5}'), "Expected `array | null`, got `int`"),
    (text(b'{"resourceSpans": "\xff"}'), "is no answer of Jaeger"),
    (text('{"resourceSpans":' * 100_000), "is no answer of Jaeger"),
    (short, "ended early"),
    (text("", 302, Location="http://127.0.0.2:1/"), "redirects to another host (127.0.0.2:1), which is refused"),
])
def test_what_is_no_trace_is_one_sentence(answer: Answer, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever else a server answers, on both routes, is exit code 2, one sentence, and no traceback."""
    with served(answer) as page:
        code, out, err = run(capsys, ID, "--jaeger", page.url)
        assert (code, out) == (2, "")
        assert sentence.format(page.url) in err
    assert err.count("\n") == 1
    assert len(err) < 500


def test_an_answer_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """What is larger than the bound is not read to its end, and the other route is not asked."""
    monkeypatch.setattr(_fetch, "MAX_BYTES", 1024**2)
    with served(text(b" " * (1024**2 + 1))) as page:
        code, out, err = run(capsys, ID, "--jaeger", page.url)
    assert (code, out) == (2, "")
    assert err.endswith("is larger than 1 MiB.\n")
    assert len(page.asked) == 1


def test_a_jaeger_that_is_silent_is_given_up() -> None:
    """A server that begins and does not end is left after the time that was given, and the other route is not asked."""
    done: list[Callable[[], None]] = []

    def silent(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        request.rfile.read(1)  # until the other side closes

    with served(silent) as page:
        with pytest.raises(TraceError, match=r"did not answer in full within 0.2 s"):
            fetch(page.url, ID, timeout_s=0.2)
        assert len(page.asked) == 1
    assert not done


def test_a_turn_of_the_store_is_a_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prefill and decode stand below the turn, with migrations, decisions and out-of-memory errors of its time."""
    write(tmp_path / "store", traced(outcome="out_of_memory"), traced(OTHER, cache_id=2),
          model.Migration(1_500_000_000, ORIGIN, 1, "cpu", "meta", 2, 64, 1_500),
          model.Migration(1_500_000_000, ORIGIN, 2, "cpu", "meta", 9, 9, 9),  # of another cache
          model.Migration(500_000_000, ORIGIN, 1, "cpu", "meta", 8, 8, 8),  # before it
          model.OutOfMemory(3_000_000_000, ORIGIN, "anna", "no \x1b[31mroom"),
          model.OutOfMemory(3_000_000_000, ORIGIN, "bert", "of another session"),
          model.Decided(1_200_000_000, "tiny@cpu", "default", "act", 1, "closed", "open", "It is full.", (), (), 1),
          model.Decided(1_200_000_000, "cuda:7", "default", "act", 1, "closed", "open", "Elsewhere.", (), (), 1))
    code, out, err = run(capsys, ID, "--store", str(tmp_path / "store"))
    assert (code, err) == (0, "")
    title, *lines, note = out.splitlines()
    assert title == f"Trace {ID}: 3 spans, 2.000 s, from the store at {tmp_path / 'store'}."
    assert lines == [
        "         +0 s      2.000 s  text_completion tiny failed: out of memory",
        "  +200.000 ms               │  • kvobs.breaker.decision kvobs.breaker.scope=tiny@cpu kvobs.breaker.mode=act "
        "kvobs.breaker.level=1 kvobs.breaker.before=closed kvobs.breaker.after=open kvobs.breaker.reason=It is full.",
        "  +500.000 ms               │  • kvobs.migration src=cpu dst=meta buffers=2 bytes=64 duration_s=1.5e-06",
        r"     +2.000 s               │  • kvobs.out_of_memory message=no \x1b[31mroom",
        "         +0 s   400.000 ms  ├─ prefill",
        "  +400.000 ms      1.600 s  └─ decode"]
    assert note.startswith("The store keeps turns, their phases and events;")


def test_a_request_of_the_store_has_its_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The phases and preemptions of the request that ended with the turn, and of no other of its session."""
    pool = origin("tiny", cache="KVCacheManager")

    def phase(begin: int, end: int, name: str, outcome: str = "", request: str = "r1") -> model.RequestPhase:
        return model.RequestPhase(end, begin, pool, 7, request, "anna", name, outcome, 3)

    def lost(request: str) -> model.Preemption:
        return model.Preemption(2_000_000_000, pool, 7, request, "anna", "blocks", "r2", 40, 3, ())

    write(tmp_path / "store", phase(1_000_000_000, 1_100_000_000, "queued"),
          phase(1_100_000_000, 2_000_000_000, "decode"), phase(2_000_000_000, 2_500_000_000, "preempted"),
          phase(1_000_000_000, 2_900_000_000, "decode", "ok", "r2"), lost("r1"), lost("r2"),
          phase(2_500_000_000, 3_000_000_000, "decode", "ok"), traced(origin=pool, cache_id=7))
    told = json.loads(run(capsys, ID, "--store", str(tmp_path / "store"), "--json")[1])
    assert [(one["name"], one["depth"], one["offset_ns"], one["duration_ns"]) for one in told["spans"]] == [
        ("text_completion tiny", 0, 0, 2_000_000_000), ("queued", 1, 0, 100_000_000),
        ("decode", 1, 100_000_000, 900_000_000), ("preempted", 1, 1_000_000_000, 500_000_000),
        ("decode", 1, 1_500_000_000, 500_000_000)]
    assert [event["attributes"]["kvobs.tokens_lost"] for event in told["spans"][0]["events"]] == [40]


def test_last_is_the_newest_turn_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--last skips turns without a trace; from a Jaeger it also skips what was not sampled."""
    store = write(tmp_path / "store", traced(OTHER, sampled=True), traced(t_ns=4_000_000_000), turn(t_ns=9_000_000_000))
    assert run(capsys, "--last", "--store", str(store))[1].startswith(f"Trace {ID}: 3 spans")
    with served(text("", 404)) as page:
        code, _, err = run(capsys, "--last", "--store", str(store), "--jaeger", page.url)
    assert (code, err) == (2, f"kvobs: The Jaeger at {page.url} has no trace {OTHER}.\n")


def test_the_configured_jaeger_and_store_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """Jaeger goes before the store where a setting names it; a named store, or --jaeger off, goes before that."""
    store = write(tmp_path / "store", traced())
    monkeypatch.setenv("KVOBS_STORE", str(store))
    assert "from the store at" in run(capsys, ID)[1]
    with served(text("", 404)) as page:
        monkeypatch.setenv("KVOBS_JAEGER_URL", page.url)
        assert run(capsys, ID)[0] == 2
        asked = len(page.asked)
        assert asked == 2
        assert run(capsys, ID, "--jaeger", "off")[0] == run(capsys, ID, "--store", str(store))[0] == 0
        assert len(page.asked) == asked


def test_a_store_without_the_trace_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown trace, and --last where no turn has one, are exit code 2."""
    store = write(tmp_path / "store", turn())
    assert run(capsys, ID, "--store", str(store)) == (
        2, "", f"kvobs: The store at {store} has no turn of the trace {ID}.\n")
    assert run(capsys, "--last", "--store", str(store))[2] == (
        f"kvobs: The store at {store} has no turn with a trace; turns have one where an OpenTelemetry SDK records.\n")
    (tmp_path / "text").write_text("no store")
    assert "cannot be read as a kvobs store" in run(capsys, ID, "--store", str(tmp_path / "text"))[2]


def test_turns_of_a_trace_come_from_all_files(tmp_path: Path) -> None:
    """Turns of several processes are one list in the order of their beginnings."""
    for wall in (WALL + 5, WALL):
        write(tmp_path / "store", traced(wall_start_ns=wall), traced(OTHER))
    reader = StoreReader(tmp_path / "store")
    assert [one.record.wall_start_ns for one in turns_of_trace(reader, ID)] == [WALL, WALL + 5]
    assert last_traced(reader, sampled=True) is None


def test_more_spans_than_asked_for_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--spans bounds what is printed and says how many are left; 0 prints all, --attributes what spans carry."""
    store = str(write(tmp_path / "store", *(traced(wall_start_ns=WALL + at) for at in range(4))))
    out = run(capsys, ID, "--store", store, "--spans", "5")[1]
    assert "7 further spans are not shown; --spans 0 prints all." in out
    assert sum(line.endswith((" text_completion tiny", " prefill", " decode")) for line in out.splitlines()) == 5
    everything = run(capsys, ID, "--store", store, "--spans", "0", "--attributes")[1]
    assert everything.count("prefill") == everything.count("gen_ai.usage.input_tokens=11") == 4
