"""The CPU allocation probe in whole processes: started by the runtime, absent with a reason, and across a fork."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator import _build
from tests.support import run_python

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# Starts a runtime, waits until the probe counts or says why not, makes 100 tensors and drops 40, and says what it saw.
CHILD = """
import json, os, sys, threading
from kvobs import config
from kvobs.runtime import Runtime

runtime = Runtime(config.load(store="off", prometheus="off"))
runtime.start()
import torch

def seen():
    runtime.tick(sample=True)
    points = {row.name: values for row, values in runtime.metrics.collect()}
    found = {f"{name} {' '.join(key)}": value for name, values in points.items() if name.startswith("kvobs.alloc.")
             for key, value in values.items() if not hasattr(value, "counts")}
    facts = {subject: reason for subject, reason in points["kvobs.availability"] if subject.startswith("cpu_alloc")}
    return found, facts

pause = threading.Event()
for _ in range(1200):
    found, facts = seen()
    if found or facts["cpu_alloc"] not in ("torch is not imported in this process.",
                                           "The probe is being compiled or loaded."):
        break
    pause.wait(0.1)
before = seen()[0]
kept = [torch.empty(1000) for _ in range(100)]
del kept[:40]
after, facts = seen()
print(json.dumps([before, after, facts]), flush=True)
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        runtime.after_fork_in_child()
        inherited = seen()[0]
        kept.clear()
        print(json.dumps([inherited, seen()[0], seen()[1]]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(json.dumps([after, seen()[0], facts]), flush=True)
runtime.stop()
"""


def told(*arguments: str, **settings: str) -> list[tuple[dict[str, float], dict[str, float], dict[str, str]]]:
    """What the process said: counters before and after its deeds, and facts."""
    done = run_python(CHILD, *arguments, **settings)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]  # type: ignore[misc]


def grown(before: dict[str, Any], after: dict[str, Any], name: str) -> float:
    return float(after[f"kvobs.alloc.{name}"] - before[f"kvobs.alloc.{name}"])


def test_a_process_that_imports_torch_is_counted() -> None:
    """With nothing but the runtime started, 100 tensors made and 40 dropped are exactly what the metrics grow by."""
    ((before, after, facts),) = told()
    if facts["cpu_alloc"]:
        pytest.skip(facts["cpu_alloc"])
    assert grown(before, after, "operations cpu allocate") == 100
    assert grown(before, after, "operations cpu free") == 40
    assert grown(before, after, "io cpu allocate") >= 100 * 4000
    assert after["kvobs.alloc.interval cpu"] == 64


def test_a_forked_child_counts_for_itself() -> None:
    """The child starts with what is alive as allocated and nothing freed; its frees are not its parent's."""
    found = told("fork")
    if found[0][2]["cpu_alloc"]:
        pytest.skip(found[0][2]["cpu_alloc"])
    (_, after, _), (inherited, ended, _), (_, parent, _) = found
    alive = after["kvobs.alloc.operations cpu allocate"] - after["kvobs.alloc.operations cpu free"]
    assert inherited["kvobs.alloc.operations cpu allocate"] == alive >= 60
    assert inherited["kvobs.alloc.operations cpu free"] == 0
    assert grown(inherited, ended, "operations cpu free") == 60
    assert grown(after, parent, "operations cpu free") == 0


def test_without_a_compiler_the_heap_is_read(tmp_path: Path) -> None:
    """Where nothing is compiled and nothing can be, there is a reason and no point, and the process runs as ever."""
    (tmp_path / "bin").mkdir()
    ((_, after, facts),) = told(PATH=str(tmp_path / "bin"), XDG_CACHE_HOME=str(tmp_path))
    assert after == {}
    assert facts == {"cpu_alloc": "Single CPU allocations are not counted, only the heap is read: There is no C++ "
                                  f"compiler ({', '.join(_build.COMPILERS)}) on the PATH."}


def test_it_is_off_where_compiled_parts_are() -> None:
    """With native=off there is a reason and no point."""
    ((_, after, facts),) = told(KVOBS_NATIVE="off")
    assert (after, facts) == ({}, {"cpu_alloc": "The setting native is off."})
