"""The live view's pages, run by Streamlit's own test runner over real stores."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("altair")

from kvobs import model
from kvobs.catalog import BY_NAME
from kvobs.store import StoreReader, StoreWriter
from tests.events import attention, step, turn

SECOND = 1_000_000_000
WALL = 1_700_000_000 * SECOND
PAGES = ("breaker", "live", "turns", "attention")


def run(page: str, store: Path) -> Any:
    """The page's script, run once; an exception in it fails the test."""
    from streamlit.testing.v1 import AppTest

    script = f"from streamlit_app.views import {page}\n{page}.render({str(store)!r})\n"
    found = AppTest.from_string(script, default_timeout=60).run()
    assert not found.exception, found.exception
    return found


def text(found: Any) -> str:
    kinds = (found.info, found.warning, found.success, found.error, found.caption, found.markdown)
    code = [str(element.value) for element in found.code]
    return "\n".join([*(read(str(element.value)) for kind in kinds for element in kind), *code])


def read(markdown: str) -> str:
    """What a reader sees of Markdown whose only marks are backslashes."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", markdown)


def write(directory: Path, process: str, seconds: int, session: str = "anna") -> None:
    now = [0]
    writer = StoreWriter(directory, 256 * 1024**2, process, clock=lambda: now[0], wall=lambda: WALL)
    for second in range(seconds):
        now[0] = second * SECOND
        writer.write([step(t_ns=now[0]), attention(t_ns=now[0], tokens=50 + second),
                      turn(t_ns=now[0], turn=second + 1, session=session, trace_id="ab" * 16)])
        writer.write_points([(BY_NAME["kvobs.kv.usage"], {("m", "cpu", "x", "held"): 1_000.0 + second}),
                             (BY_NAME["kvobs.kv.reallocations"], {("m", "cpu", "x", "decode"): 60.0 * second})])
        writer.commit()
    writer.write([model.Availability("cuda", False, "There is no CUDA device.")])
    writer.write([model.FlightRecord(now[0], "out_of_memory", "cuda:0", 512, "no memory", '{"age_s":[1]}', "")])
    writer.close()


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("there", [True, False])
def test_without_a_store_a_page_says_how_to_begin(tmp_path: Path, page: str, there: bool) -> None:
    """A directory that is empty or missing gives one friendly sentence on every page."""
    found = run(page, tmp_path if there else tmp_path / "later")
    assert "kvobs run -- python serve.py" in text(found)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("seconds", [1, 2, 30])
def test_pages_render(tmp_path: Path, page: str, seconds: int) -> None:
    """One point, two, or many: every page renders, and nothing on it is an error."""
    write(tmp_path, "p", seconds)
    found = run(page, tmp_path)
    assert not found.error


def test_live_says_what_the_store_says(tmp_path: Path) -> None:
    """The figures are the last points, the rate their growth, and an ended process is said to have ended."""
    write(tmp_path, "p", 30)
    found = run("live", tmp_path)
    metrics = {metric.label: metric.value for metric in found.metric}
    assert metrics["KV held"] == "1.00 KiB"
    assert metrics["Re-allocations /s"] == "60"
    assert metrics["Caches"] == "absent"
    assert "1,029 B · " in text(found)
    assert "The process has ended" in text(found)
    (facts,) = found.table
    assert [{name: read(cell) for name, cell in row.items()} for row in facts.value.to_dict("records")] == [
        {"subject": "cuda", "seen": "no", "why": "There is no CUDA device."}]
    assert [read(expander.label) for expander in found.expander] == [
        "Flight record: out_of_memory on cuda:0, 2023-11-14 22:13:49 UTC"]


def test_turns_say_what_the_store_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables hold a line per turn with its exact bytes; the trace is a link once an address is set."""
    write(tmp_path, "p", 3)
    found = run("turns", tmp_path)
    sizes, work = found.table[0].value, found.table[1].value
    assert sizes["turn"].tolist() == [1, 2, 3]
    assert sizes["KV held"].tolist() == ["1,000 B"] * 3
    assert work["re-allocations"].tolist() == [20] * 3
    assert f"Trace of turn 3: {'ab' * 16}" in text(found)
    monkeypatch.setenv("KVOBS_JAEGER_URL", "http://jaeger.example:16686/")
    assert f"[Trace of turn 3](http://jaeger.example:16686/trace/{'ab' * 16})" in text(run("turns", tmp_path))


def test_attention_says_how_much_is_sampled(tmp_path: Path) -> None:
    """The page says the interval, and its figures are the last second's sums divided by their counts."""
    write(tmp_path, "p", 5)
    found = run("attention", tmp_path)
    assert "Sampled: one of 3 decode steps" in text(found)
    assert {metric.label: metric.value for metric in found.metric} == {
        "Alive (cosine)": "75.0 %", "Mass within 64 tokens": "79.2 %", "Chance line": "60.4 %",
        "Blocks pending evict": "6 of 21", "Reclaimable": "12.00 KiB",
        "Held by the cache": "1,000 B"}


def test_attention_that_was_not_sampled_says_why(tmp_path: Path) -> None:
    """Without samples the page says how to switch them on, and the reason that the process gave."""
    writer = StoreWriter(tmp_path, 64 * 1024**2, "p")
    writer.write([turn(), model.Availability("attention", False, "Deep sampling is off.")])
    writer.close()
    found = text(run("attention", tmp_path))
    assert "kvobs run --deep" in found
    assert "Deep sampling is off." in found


def test_two_processes_are_told_apart(tmp_path: Path) -> None:
    """Both processes are in the picker, with an entry for all of them; sessions of one name stay apart."""
    write(tmp_path, "first", 3)
    write(tmp_path, "second", 3)
    found = run("live", tmp_path)
    (picker,) = found.sidebar.selectbox
    assert len(picker.options) == 3
    assert picker.options[-1] == "All 2 processes"
    picker.select("all").run()
    assert not found.exception
    assert {metric.label: metric.value for metric in found.metric}["KV held"] == "1.96 KiB"
    (sessions,) = run("turns", tmp_path).sidebar.selectbox
    assert len(set(sessions.options)) == 2


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "x" * 4_000, "a\nb\tc", "", "`**`[l](https://x)",
                                  "![x](https://example.org/x.png)", ":red[x] $x$ :material/home:", "# x", "|a|b|"])
def test_hostile_names_are_text(tmp_path: Path, name: str) -> None:
    """Whatever a session, a model or a reason is called, the pages render, and none of it is read as markup."""
    writer = StoreWriter(tmp_path, 256 * 1024**2, "p")
    origin = model.Origin("transformers", name, name, name, "float32")
    writer.write([step(origin=origin), attention(origin=origin, session=name), model.Availability(name, False, name),
                  turn(origin=origin, session=name, outcome=name, trace_id="ab" * 16),
                  model.FlightRecord(0, name, name, 512, name, '{"age_s":[1]}', "")])
    writer.write_points([(BY_NAME["kvobs.kv.usage"], {(name, name, name, "held"): 1.0})])
    writer.close()
    for page in PAGES:
        found = run(page, tmp_path)
        marked = [str(element.value) for kind in (found.markdown, found.caption, found.warning, found.info)
                  for element in kind if not str(element.value).startswith("[Trace of turn ")]
        marked += [expander.label for expander in found.expander]
        marked += [str(cell) for table in found.table for cell in table.value.to_numpy().ravel()]
        assert not [text for text in marked if re.search(r"(?<!\\)[<\[\]`*$#|]", text)]
        assert not any(element.allow_html for element in found.markdown)


def test_a_choice_outlives_a_new_order(tmp_path: Path) -> None:
    """The chosen session stays chosen, under its name, while others begin and get turns."""
    write(tmp_path, "p", 1, session="anna")
    write(tmp_path, "p", 2, session="ben")
    found = run("turns", tmp_path)
    assert set(found.sidebar.selectbox[0].options) == {"anna", "ben"}
    found.sidebar.selectbox[0].select(("p", "anna")).run()
    assert found.table[0].value["turn"].tolist() == [1]
    write(tmp_path, "p", 3, session="anna")
    write(tmp_path, "p", 1, session="carl")
    found.run()
    assert set(found.sidebar.selectbox[0].options) == {"anna", "ben", "carl"}
    assert found.sidebar.selectbox[0].value == ("p", "anna")
    assert found.table[0].value["turn"].tolist() == [1, 1, 2, 3]


def test_a_choice_outlives_a_new_name(tmp_path: Path) -> None:
    """A process that was chosen while it ran stays chosen when it ends, and its name says that it ended."""
    write(tmp_path, "old", 2)
    writers = [StoreWriter(tmp_path, 64 * 1024**2, name) for name in ("one", "two")]
    for writer in writers:
        writer.commit()
    found = run("live", tmp_path)
    for chosen in ("one", "two"):
        found.sidebar.selectbox[0].select(chosen).run()
        assert found.sidebar.selectbox[0].value == chosen
    writers[1].close()
    found.run()
    picker = found.sidebar.selectbox[0]
    assert picker.value == "two"
    assert [option for option in picker.options if "ended" in option and option.endswith("two")]
    found.run()
    assert found.sidebar.selectbox[0].value == "two"
    writers[0].close()
    found.sidebar.selectbox[0].select("old").run()
    assert found.sidebar.selectbox[0].value == "old"
    assert not found.exception


def test_sessions_that_look_alike_are_told_apart(tmp_path: Path) -> None:
    """Two long names with one beginning are two entries, and each shows its own turns."""
    write(tmp_path, "p", 1, session="x" * 200 + "1")
    write(tmp_path, "p", 1, session="x" * 200 + "2")
    found = run("turns", tmp_path)
    assert len(set(found.sidebar.selectbox[0].options)) == 2


def test_several_processes_have_lines_of_their_own(tmp_path: Path) -> None:
    """With all processes chosen each chart has a line per process, counters and windows too."""
    for name in ("aaaaaa1", "bbbbbb2"):
        write(tmp_path, name, 3)
    found = run("live", tmp_path)
    found.sidebar.selectbox[0].select("all").run()
    specs = [json.loads(chart.proto.spec) for chart in found.get("vega_lite_chart")]
    domains = {spec["title"]: spec.get("layer", [spec])[0]["encoding"]["color"]["scale"]["domain"] for spec in specs}
    assert {title: {label.split(" · ")[0].split()[-1] for label in labels} for title, labels in domains.items()} == {
        title: {"aaaaaa", "bbbbbb"} for title in ("KV bytes", "Re-allocations per second")}


def test_a_silent_process_is_stale(tmp_path: Path) -> None:
    """A process that runs but wrote its last sample years ago is said to be stale, and its last figures stay."""
    now = [0]
    writer = StoreWriter(tmp_path, 64 * 1024**2, "p", clock=lambda: now[0], wall=lambda: WALL)
    try:
        writer.write_points([(BY_NAME["kvobs.kv.usage"], {("m", "cpu", "x", "held"): 1_029.0})])
        writer.commit()
        found = run("live", tmp_path)
    finally:
        writer.close()
    assert "although the process is running" in text(found)
    assert {metric.label: metric.value for metric in found.metric}["KV held"] == "1.00 KiB"


def test_an_unreadable_neighbour_is_named(tmp_path: Path) -> None:
    """A damaged file of the directory is a warning with its name, beside what can be read."""
    write(tmp_path, "p", 3)
    (tmp_path / "kvobs-x-000001.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 5_000)
    found = run("live", tmp_path)
    assert any("kvobs-x-000001.sqlite" in read(str(warning.value)) for warning in found.warning)
    assert found.metric


def big(directory: Path, rows: int) -> None:
    """A store with that many points, 50 series per second, written as the writer's schema has them."""
    write(directory, "p", 1)
    (path,) = directory.glob("kvobs-*.sqlite")
    with sqlite3.connect(path) as connection:
        names = [row[0] for row in connection.execute("SELECT metric FROM series")]
        connection.execute("DELETE FROM points")
        connection.executemany("INSERT INTO series (metric, attributes) VALUES (?, ?)", [
            (names[0], f'{{"model": "m{number}", "device": "cpu", "cache": "x", "state": "held"}}')
            for number in range(48)])
        connection.execute("""
            WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < ?)
            INSERT INTO points (wall_ns, series, value) SELECT ? + (i / 50) * 1000000000, 1 + i % 50, i FROM n
            """, (rows, WALL - (rows // 50) * SECOND))
    connection.close()


def test_a_million_rows_render(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A store with a million points renders over its whole range (how fast is measured by the benchmark)."""
    big(tmp_path, 1_000_000)
    assert sum(1 for _ in StoreReader(tmp_path).rows("points", ["value"])) == 1_000_000
    found = run("live", tmp_path)
    found.sidebar.radio[0].set_value("all").run()
    assert not found.exception
    assert {metric.label: metric.value for metric in found.metric}["KV held"] != "absent"


def test_navigation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that Streamlit is given runs, with the store as its one argument."""
    from streamlit.testing.v1 import AppTest

    from kvobs.cli._view import app

    write(tmp_path, "p", 3)
    monkeypatch.setattr("sys.argv", ["app.py", str(tmp_path)])
    found = AppTest.from_file(str(app()), default_timeout=60).run()
    assert not found.exception
    assert "The process has ended" in text(found)


def test_live_shows_the_verdicts_of_a_flight_record(tmp_path: Path) -> None:
    """When, where and how much failed, the verdict, its sentence and the next step's; as text, whatever it holds."""
    hostile = "![x](http://evil.example) **2 GiB** do not fit."
    snapshot = json.dumps({"verdict": {"verdict": "CAPACITY", "sentence": hostile},
                           "next_step": {"estimated": True, "verdict": "RECLAIM", "sentence": "Number 3 decides."}})
    writer = StoreWriter(tmp_path, 256 * 1024**2, "p", clock=lambda: 0, wall=lambda: WALL)
    writer.write([step(t_ns=0), model.FlightRecord(0, "out_of_memory", "cuda:0", 3 << 30, "no", "", snapshot)])
    writer.close()
    shown = next(str(element.value) for element in run("live", tmp_path).markdown if "CAPACITY" in str(element.value))
    assert read(shown) == (
        "cuda:0, 2023-11-14 22:13:20 UTC, 3.00 GiB asked of the device\n\n"
        f"- The request that failed: **CAPACITY**. {hostile}\n"
        "- The next step, estimated: **RECLAIM**. Number 3 decides.")
    assert "![x](" not in shown
    assert r"\*\*2 GiB\*\*" in shown
