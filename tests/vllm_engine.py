"""The scenes on vLLM's real engine, played once per Python that ``KVOBS_TEST_VLLM`` names, for the tests of them."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, child_environment, run_child

VARIABLE = "KVOBS_TEST_VLLM"
WHY_NOT = f"{VARIABLE} names no Python of an environment with vLLM and kvobs (scripts/vllm_env.sh makes one)."
Scene = dict[str, Any]


def interpreters() -> list[str]:
    """The Pythons with vLLM, one per version of it; they are separated by colons."""
    return [one for one in os.environ.get(VARIABLE, "").split(":") if one]


@functools.cache
def played(python: str) -> dict[str, Any]:
    """What the scenes saw in this Python."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "seen.json"
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "TMPDIR": directory, "PYTHONPATH": str(ROOT)}
        done = run_child([python, "-m", "tests.vllm_scenes", target], env=child_environment(**settings), cwd=ROOT,
                         timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return found


def scene(python: str, name: str) -> Scene:
    """One scene; a skip without vLLM, a failure where the scene raised."""
    if not python:
        pytest.skip(WHY_NOT)
    found: Scene = played(python)[name]
    assert "raised" not in found, found["raised"]
    return found


def differences(seen: Scene, *left_out: str) -> list[tuple[Any, ...]]:
    """Where kvobs and the account differ: (step, call, figure, account, kvobs). A call that told nothing differs."""
    start, found = seen.get("start", {}), []
    for look in seen["looks"][seen.get("first_look", 0):]:
        told = look["kvobs"] or {}
        for name, value in look["account"].items():
            if name not in left_out and told.get(name) != value - start.get(name, 0):
                found.append((look["step"], look["where"], name, value - start.get(name, 0), told.get(name)))
    return found


def phases_by_request(seen: Scene) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The phases of each request, as they were published."""
    for name in dict.fromkeys(phase["request"] for phase in seen["kvobs"]["phases"]):
        yield name, [phase for phase in seen["kvobs"]["phases"] if phase["request"] == name]


def lives(seen: Scene) -> dict[str, list[str]]:
    """The names of each request's phases, as kvobs told them."""
    return {name: [phase["phase"] for phase in phases] for name, phases in phases_by_request(seen)}
