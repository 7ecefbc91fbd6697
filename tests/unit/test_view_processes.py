"""What processes are called and which comes first, and what the pages say of an engine that they do not show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("streamlit")
pytest.importorskip("altair")

from kvobs import model
from kvobs.catalog import BY_NAME
from kvobs.store import Process, StoreWriter
from streamlit_app import processes
from streamlit_app.processes import Known
from tests.events import turn
from tests.serving_store import ORIGIN, pool, states, write
from tests.unit.test_view_pages import run, text


def process(name: str, start: int, *, alive: bool = True, ended: int | None = None) -> Process:
    return Process(name, alive, 7, "host", "3.11", ("/bin/serve.py", "--model"), start, 0, None, ended, ended, 0)


def test_engine_cores_come_first_and_the_dead_last() -> None:
    """Running before ended, cores before others, and then by start."""
    found = [process("worker", 1), process("dead core", 0, alive=False, ended=9), process("api", 0),
             process("core", 5), process("second core", 6)]
    of = {name: Known(role="engine_core") for name in ("dead core", "core", "second core")}
    assert [one.process for one in processes.ordered(found, of)] == [
        "core", "second core", "api", "worker", "dead core"]


def test_a_name_says_what_a_process_is() -> None:
    """Role, ranks, model and number, or what was started; two that would be called the same have their ids."""
    found = [process("aaaaaaaa", 1), process("bbbbbbbb", 2), process("cccccccc", 3), process("d", 4, alive=False)]
    named = processes.names(found, {"aaaaaaaa": Known("vllm", "engine_core", "dp=0", "org/smol")})
    assert named == {
        "aaaaaaaa": "engine_core dp=0 · smol · PID 7", "bbbbbbbb": "serve.py --model · PID 7 · bbbbbb",
        "cccccccc": "serve.py --model · PID 7 · cccccc", "d": "serve.py --model · PID 7 · ended"}


def other(directory: Path, name: str) -> StoreWriter:
    """A running API server of the engine."""
    writer = StoreWriter(directory, 64 << 20, name)
    writer.write_points([(BY_NAME["kvobs.process.role"], {("vllm", "api_server", ""): 1.0})])
    writer.commit()
    return writer


@pytest.mark.parametrize("choose", [False, True])
def test_live_opens_on_the_engine_core(tmp_path: Path, choose: bool) -> None:
    """A core that begins after its API server is shown once it is there, unless the user chose something."""
    writers = [other(tmp_path, "server"), other(tmp_path, "second")]
    try:
        found = run("live", tmp_path)
        assert found.sidebar.selectbox[0].value == "server"
        if choose:
            found.sidebar.selectbox[0].select("second").run()
        writers.append(write(tmp_path, [pool(), states()], "core", role="dp=0", close=False))
        found.run()
        assert found.sidebar.selectbox[0].options[0] == f"engine_core dp=0 · tiny · PID {os.getpid()}"
        assert found.sidebar.selectbox[0].value == ("second" if choose else "core")
        assert not found.exception
    finally:
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("page", ["memory", "attention"])
def test_a_page_that_knows_no_engine_says_where_to_look(tmp_path: Path, page: str) -> None:
    """Of vLLM's process both pages name the page Requests, and do not advise what would not help; of others not."""
    write(tmp_path / "vllm", [pool(), states()], role="dp=0")
    said = text(run(page, tmp_path / "vllm"))
    assert "is on the page Requests" in said
    assert "vLLM" in said
    assert "--deep" not in said
    write(tmp_path / "other", [turn()])
    assert "page Requests" not in text(run(page, tmp_path / "other"))


def test_turns_of_a_shared_pool_have_no_slack(tmp_path: Path) -> None:
    """Of an engine's turn its own bytes, tokens and times are told; a pool's figures are not told as a request's."""
    write(tmp_path, [turn(origin=ORIGIN, kv_bytes=2_000, kv_reserved_bytes=9_000)])
    found = run("turns", tmp_path)
    (chart,) = found.get("vega_lite_chart")
    assert "slack" not in chart.proto.spec
    assert "9,000" not in chart.proto.spec
    sizes, times = (table.value.to_dict("records") for table in found.table[:2])
    assert sizes == [{"turn": 2, "prompt": 11, "of it cached": 4, "new": 5, "KV held": "2,000 B", "outcome": "ok"}]
    assert times == [{"turn": 2, "written": "500 B", "TTFT": "500 ms", "per token": "375 ms"}]
    assert "share one pool of KV blocks" in text(found)


def test_a_session_over_both_kinds_tells_them_apart(tmp_path: Path) -> None:
    """Where only some turns shared a pool, what these have not is absent in their lines alone."""
    write(tmp_path, [turn(turn=1), turn(turn=2, origin=model.Origin("sglang", "m", "Pool", "cpu", "float32"))])
    sizes, work = (table.value.set_index("turn") for table in run("turns", tmp_path).table[:2])
    assert sizes["largest buffer"].to_dict() == {1: "400 B", 2: "absent"}
    assert work["re-allocations"].to_dict() == {1: "20", 2: "absent"}
