"""Running a piece of a test on the virtual GPU: in a process of its own, since torch cannot take a device type back."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
_MAIN = """
if __name__ == "__main__":
    import json, sys
    told = {name}(**json.loads(sys.stdin.read()))
    sys.stdout.write("\\n" + json.dumps(told) + "\\n")
"""


def needs_vgpu() -> pytest.MarkDecorator:
    """Skip where there can be no virtual GPU, and say why; the first use on a machine compiles it."""
    from kvobs import virtual

    reason = virtual.why_not(build=False)
    if reason is None and not virtual.compiled():  # in another process: this one shall not load it
        asked = subprocess.run([sys.executable, "-c", "from kvobs import virtual; print(virtual.why_not() or '')"],
                               capture_output=True, text=True, check=False, cwd=ROOT)
        reason = asked.stdout.strip() or (asked.stderr[-500:] if asked.returncode else None)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def on_vgpu(function: Callable[..., Any], *, devices: tuple[str, ...] = ("2GiB", "2GiB"), settings: str = "",
            environ: dict[str, str] | None = None, timeout: float = 300.0, **arguments: Any) -> Any:
    """What a function returns (JSON) when it runs on fresh virtual devices, in a process of its own.

    The function is taken by its source: it imports what it needs inside, and sees only its arguments (JSON).
    """
    source = textwrap.dedent(inspect.getsource(function))
    code = (f"import kvobs.virtual\nkvobs.virtual.setup({list(devices)!r}, {settings!r})\n" + source
            + _MAIN.format(name=function.__name__))
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(arguments), capture_output=True, text=True,
                          timeout=timeout, check=False, cwd=ROOT,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "KVOBS_STORE": "off", "KVOBS_PROMETHEUS": "off",
                               **(environ or {})})
    if done.returncode:
        raise AssertionError(f"It failed on the virtual GPU (exit {done.returncode}):\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
