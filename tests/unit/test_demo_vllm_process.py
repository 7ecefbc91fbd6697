"""The process of the demo's vLLM, played by small programs: what it is given, what it tells, how it fails."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

import kvobs
from kvobs.lab.demo import _vllm_process
from kvobs.lab.demo._errors import DemoError

LOADED = {"loaded": "0.32.0", "endpoint": None}
PROGRAM = """#!{python}
import json, os, signal, subprocess, sys
given = json.loads(sys.argv[-1])
pipe = open(given["pipe"], "w")
def tell(**message):
    print(json.dumps(message), file=pipe, flush=True)
{body}
"""


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories of the test are made."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    return tmp_path / "scratch"


def played(tmp_path: Path, body: str) -> _vllm_process.Told:
    python = tmp_path / "python"
    python.write_text(PROGRAM.format(python=sys.executable, body=body))
    python.chmod(0o755)
    return _vllm_process.serve(python, Path("/models/tiny"), {"store": "/there"})


def test_what_the_process_tells_is_taken_whole(tmp_path: Path, scratch: Path,
                                               capfd: pytest.CaptureFixture[str]) -> None:
    """Progress is shown on stderr, the last message is returned, stdout stays empty, and no scratch is left."""
    told = played(tmp_path, f"""
tell(**{LOADED | {"endpoint": "http://127.0.0.1:1/metrics"}!r})
print("vLLM's own words")
for turn in (1, 2):
    for tokens in (8, 384):
        tell(turn=turn, tokens=tokens, of=384)
tell(turns=[{{"engine": {{}}, "kvobs": []}}], counted=[5, 7], process="abc")
""")
    assert told == _vllm_process.Told("0.32.0", [{"engine": {}, "kvobs": []}], [5, 7], "abc")
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split(":")[0] for line in err.splitlines()] == [
        "Loading vLLM and the model (about 30 s) ...", "Metrics are served at http", "Turn 1 of 2", "Turn 2 of 2"]
    assert list(scratch.iterdir()) == []


def test_the_process_gets_this_kvobs_and_nothing_else_of_this_python(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Another interpreter with those arguments and that environment imports this package; vLLM stays one process."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    told = played(tmp_path, f"""
code = "import kvobs, os, sys; print(os.path.realpath(kvobs.__file__)); print(sys.path)"
seen = subprocess.run([{sys.executable!r}, *sys.argv[1:3], "-c", code], capture_output=True, text=True).stdout
tell(**{LOADED!r})
tell(turns=[{{"arguments": sys.argv[1:5], "given": given, "seen": seen.splitlines(),
              "processes": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]}}], counted=[], process="")
""")
    (seen,) = told.turns
    assert seen["arguments"] == ["-s", "-P", "-m", "kvobs.lab.demo._vllm_child"]
    assert seen["seen"][0] == os.path.realpath(kvobs.__file__)
    assert "/elsewhere" not in seen["seen"][1]
    assert seen["processes"] == "0"
    assert {name: seen["given"][name] for name in ("model", "name", "settings")} == {
        "model": "/models/tiny", "name": "tiny", "settings": {"store": "/there"}}


@pytest.mark.parametrize(("body", "how"), [
    ("sys.exit('There is no such model.')", "exit code 1"),
    ("print('There is no such model.', flush=True); os.kill(os.getpid(), signal.SIGILL)", "SIGILL"),
    (f"tell(**{LOADED!r}); tell(turn=1, tokens=8, of=384); print('There is no such model.')", "exit code 0"),
    (f"tell(**{LOADED!r}); pipe.write('{{\"turns'); print('There is no such model.')", "exit code 0"),
])
def test_a_process_that_fails_is_one_sentence_with_its_output(tmp_path: Path, body: str, how: str) -> None:
    """However early it ends, the sentence says how, quotes the last line, and the named file has all of the output."""
    with pytest.raises(DemoError, match=r"the last line: There is no such model\.$") as failure:
        played(tmp_path, "print('Loading.', flush=True)\n" + body)
    assert failure.value.exit_code == 1
    assert f"({how})" in str(failure.value)
    found = re.search(r"its output is in (\S+),", str(failure.value))
    assert found is not None
    assert Path(found[1]).read_text() == "Loading.\nThere is no such model.\n"


def test_an_interrupt_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while vLLM works leaves no process behind."""
    pids: list[int] = []

    def interrupted(pipe: object) -> None:
        pids.append(json.loads(pipe.readline())["pid"])  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(_vllm_process, "_listen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        played(tmp_path, "tell(pid=os.getpid()); signal.pause()")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
