"""An operator's word to a real vLLM server: its idle engine core acts in its own process, and all of it comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvobs.model import ActionTaken
from kvobs.sources.vllm._actions import MAX_NEW_TOKENS
from kvobs.store import StoreReader, actions
from tests.support import ROOT, run_child, wait_until
from tests.vllm_server import interpreter, make_model, serving

pytestmark = [pytest.mark.slow, pytest.mark.peer]
NEVER = 'name = "never"\n' + 3 * '[[level]]\nany = [{ signal = "app.never", above = 1 }]\n'
TEXT = "The quick brown fox jumps over the lazy dog. "
# 90 tokens of prompt and 19 computed ones of the answer: three full blocks of 32.
FIRST: list[dict[str, Any]] = [{"number": 1, "prompt": TEXT * 2, "max_tokens": 20}]
BLOCK_BYTES = 2 * 2 * 2 * 32 * 32 * 2  # K and V, layers, heads, head size, tokens, bytes of bfloat16
BOTH: list[dict[str, Any]] = [
    {"number": 11, "prompt": TEXT, "max_tokens": 150, "baggage": "session.id=a,session.priority=sheddable"},
    {"number": 12, "prompt": TEXT, "max_tokens": 150, "baggage": "session.id=b,session.priority=normal"}]


class Recorded(NamedTuple):
    """What the engine core answered at each level that was set, what clients got, and the server's exit code."""

    taken: dict[str, list[ActionTaken]]
    degraded: dict[int, int]
    restored: dict[int, int]
    code: int


def told(store: Path) -> list[ActionTaken]:
    """What became of orders so far."""
    return [one.record for one in actions(StoreReader(store))] if store.exists() else []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """One server: a request, then at rest level 1, level 3 with two requests, and level 0 with two more."""
    interpreter()
    here = tmp_path_factory.mktemp("vllm-actions")
    store, policy = here / "store", here / "policy.toml"
    policy.write_text(NEVER, encoding="utf-8")
    settings = {"KVOBS_STORE": str(store), "KVOBS_PROMETHEUS": "off", "VLLM_PLUGINS": "kvobs", "KVOBS_BREAKER": "act",
                "KVOBS_BREAKER_POLICY": str(policy), "PYTHONPATH": str(ROOT)}
    taken: dict[str, list[ActionTaken]] = {}

    def set_level(level: int, awaited: Callable[[list[ActionTaken]], bool]) -> None:
        before = len(told(store))
        done = run_child([sys.executable, "-m", "kvobs", "breaker", "set", str(level), str(store)], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: awaited(told(store)[before:]), what=f"Level {level}", timeout=60)
        taken[str(level)] = told(store)[before:]

    with serving(make_model(here), here, settings=settings) as server:
        server.asked(FIRST)
        set_level(1, lambda found: {"prefix_cache_reset", "kv_aware_admission"} <= {one.kind for one in found})
        set_level(3, lambda found: "clamp_tokens" in {one.kind for one in found})
        degraded = {one["number"]: one["completion"] for one in server.asked(BOTH)}
        set_level(0, lambda found: {"clamp_tokens", "kv_aware_admission"} <= {one.kind for one in found if one.undo})
        restored = {one["number"]: one["completion"] for one in server.asked(BOTH)}
        yield Recorded(taken, degraded, restored, server.terminate())


def test_an_idle_engine_core_acts_within_its_time(recorded: Recorded) -> None:
    """Nobody asks anything, yet the prefix cache of earlier requests is dropped at once, before the deadline."""
    found = {one.kind: one for one in recorded.taken["1"]}
    reset = found["prefix_cache_reset"]
    assert (reset.actuator, reset.level, reset.done, reset.late) == ("vllm", 1, True, False)
    assert (reset.bytes, reset.reason) == (3 * BLOCK_BYTES, "3 cached blocks lost their content.")
    print(f"\nreset {reset.duration_ns / 1e6:.2f} ms, admission {found['kv_aware_admission'].duration_ns / 1e6:.2f} ms")


def test_sheddable_sessions_get_less_and_others_do_not(recorded: Recorded) -> None:
    """At level 3 one client gets 64 tokens of 150, the other all; back at level 0 both get all."""
    assert recorded.degraded == {11: MAX_NEW_TOKENS, 12: 150}
    assert recorded.restored == {11: 150, 12: 150}


def test_everything_is_undone_and_the_server_ends_as_always(recorded: Recorded) -> None:
    """Each answer to an undoing is done; a pause of an idle engine was refused with the reason; the exit code is 0."""
    undone = {one.kind: one for one in recorded.taken["0"] if one.undo}
    assert set(undone) >= {"kv_aware_admission", "clamp_tokens"}
    assert all(one.done and not one.late for one in undone.values())
    pause, = (one for one in recorded.taken["3"] if one.kind == "pause")
    assert (pause.done, pause.level) == (False, 2)
    assert pause.reason.startswith("No request runs")
    assert recorded.code == 0
