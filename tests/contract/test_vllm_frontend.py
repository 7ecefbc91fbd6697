"""vLLM's own classes of the front end, in every version at hand: hooked, unhooked, and unharmed (no engine runs)."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from tests.support import ROOT, child_environment, run_child
from tests.vllm_engine import WHY_NOT, interpreters

PARENT_TRACE, PARENT_SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


@functools.cache
def played(python: str) -> dict[str, Any]:
    done = run_child([python, "-m", "tests.vllm_front"], env=child_environment(), cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(params=interpreters() or [""], ids=lambda python: python.split("/")[-3] if python else "none")
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What ``tests.vllm_front`` saw."""
    if not request.param:
        pytest.skip(WHY_NOT)
    return played(request.param)


def same(span: dict[str, Any]) -> dict[str, Any]:
    """What of a span is not drawn at random."""
    return {key: value for key, value in span.items() if key != "id"}


def test_everything_is_found(seen: dict[str, Any]) -> None:
    """Every part of the front end is observed in this version."""
    assert seen["availability"] == dict.fromkeys(
        ("vllm http contexts", "vllm request contexts", "vllm request spans", "vllm shutdown"), "")


def test_only_what_is_named_is_replaced_and_all_of_it_is_restored(seen: dict[str, Any]) -> None:
    """The ten places that the module names are others while it is installed, and the very same objects after."""
    assert {name.split(".", 2)[2] if name.startswith("vllm") else name for name in seen["patched"]} == {
        "starlette.applications.Starlette.__call__", "engine.async_llm.AsyncLLM.__init__",
        "engine.core.EngineCore.shutdown", "engine.llm_engine.LLMEngine.__init__",
        "engine.output_processor.OutputProcessor.add_request", "engine.output_processor.OutputProcessor.do_tracing",
        "engine.output_processor.vllm.v1.engine.output_processor.instrument_manual",
        "engine.utils.CoreEngineProcManager.shutdown", "executor.abstract.Executor.__init__",
        "worker.worker_base.WorkerBase.__init__"}
    assert seen["left"] == []


def test_vllms_own_span_is_the_same_with_and_without(seen: dict[str, Any]) -> None:
    """The ``llm_request`` span has the parent, times, kind, scope and attributes that it has without kvobs."""
    for plain, observed in zip(seen["plain"], seen["observed"], strict=True):
        own = [span for span in observed if span["name"] == "llm_request"]
        if plain[0]["parent"] is None:  # a trace of its own, drawn at random
            assert own[0].pop("trace")
            assert plain[0].pop("trace")
        assert [same(span) for span in own] == [same(span) for span in plain]
    assert (seen["plain"][0][0]["trace"], seen["plain"][0][0]["parent"]) == (PARENT_TRACE, PARENT_SPAN)


def test_phases_are_its_children(seen: dict[str, Any]) -> None:
    """The phases that came with the output are children of that very span, with their events; without phases none."""
    with_phases, without = seen["observed"]
    root, = (span for span in with_phases if span["name"] == "llm_request")
    children = {span["name"]: span for span in with_phases if span is not root}
    told = {name: (span["start"], span["events"]) for name, span in children.items()}
    assert told == {"queued": (100, []), "decode": (200, ["kvobs.preempted"])}
    assert {(span["parent"], span["trace"]) for span in children.values()} == {(root["id"], PARENT_TRACE)}
    assert len(without) == 1


def test_roles_come_from_the_constructors(seen: dict[str, Any]) -> None:
    """A process that makes an executor and then a worker in itself is an engine core, told once."""
    assert seen["roles"] == [["engine_core", [["dp", 0]]]]


def test_a_hook_that_fails_harms_nobody(seen: dict[str, Any]) -> None:
    """Where the phases are none, vLLM's span is written, the hook is taken away and the reason said."""
    assert [span["name"] for span in seen["broken"]] == ["llm_request"]
    assert seen["failures"] == ["OutputProcessor.do_tracing"]
    assert seen["after"]["vllm request spans"] == "The hook OutputProcessor.do_tracing failed and was detached."
