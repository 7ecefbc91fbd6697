"""The places in vLLM that a breaker's orders touch, read from the sources of several versions without running them."""

from __future__ import annotations

import ast

import pytest

from tests.contract import test_vllm_signatures as signatures

MODULES = {"EngineCoreProc": "vllm/v1/engine/core.py", "EngineCore": "vllm/v1/engine/core.py",
           "EngineCoreRequestType": "vllm/v1/engine/__init__.py", "PauseState": "vllm/v1/core/sched/interface.py",
           "AsyncLLM": "vllm/v1/engine/async_llm.py", "FreeKVCacheBlockQueue": "vllm/v1/core/kv_cache_utils.py"}
METHODS = {"EngineCoreProc": {"_process_input_queue": ["self"], "has_work": ["self"]},
           "Scheduler": {"has_requests": ["self"], "set_pause_state": ["self", "pause_state"]},
           "Request": {"is_finished": ["self"]},
           "FreeKVCacheBlockQueue": {"remove": ["self", "block"], "append": ["self", "block"],
                                     "prepend_n": ["self", "blocks"]}}
ATTRIBUTES = {"EngineCoreProc": "input_queue", "EngineCore": "scheduler",
              "Scheduler": "running requests _pause_state connector",
              "FreeKVCacheBlockQueue": "fake_free_list_head num_free_blocks",
              "KVCacheManager": "enable_caching", "SingleTypeKVCacheManager": "block_size",
              "Request": "max_tokens sampling_params num_output_tokens num_prompt_tokens num_tokens resumable"}
Texts = dict[str, dict[str, str]]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Texts:
    """The text of each version's modules."""
    for name, path in MODULES.items():
        monkeypatch.setitem(signatures.MODULES, name, path)
    found = dict(signatures.sources())
    if not found:
        pytest.skip(f"Neither KVOBS_TEST_VLLM nor {signatures.WHEELS} names a vLLM to read.")
    return found


def assigned(text: str, name: str) -> set[str]:
    """The members of an enumeration."""
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return {target.id for node in found.body if isinstance(node, ast.Assign) for target in node.targets
            if isinstance(target, ast.Name)}


def called(text: str, name: str, method: str) -> set[str]:
    """What a method calls, by the last part of each name."""
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    body = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method)
    return {node.func.attr for node in ast.walk(body) if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)}


def test_every_version_has_what_orders_touch(versions: Texts) -> None:
    """Methods have these parameters, objects these attributes, and the two enumerations these members."""
    for version, texts in versions.items():
        for owner, methods in METHODS.items():
            there = signatures.members(texts[owner], owner)[0]
            assert {name: there[name] for name in methods} == methods, (version, owner)
        for owner, names in ATTRIBUTES.items():
            assert set(names.split()) <= signatures.members(texts[owner], owner)[1], (version, owner)
        assert "WAKEUP" in assigned(texts["EngineCoreRequestType"], "EngineCoreRequestType")
        assert {"UNPAUSED", "PAUSED_NEW"} <= assigned(texts["PauseState"], "PauseState")


def test_every_engine_core_asks_its_scheduler_whenever_it_was_woken(versions: Texts) -> None:
    """The loop asks whether there is work after each message, and that asks the scheduler: the safe point when idle."""
    for version, texts in versions.items():
        core = texts["EngineCoreProc"]
        assert {"has_work", "get"} <= called(core, "EngineCoreProc", "_process_input_queue"), version
        assert "has_requests" in called(core, "EngineCoreProc", "has_work"), version
        assert "has_requests" in called(core, "EngineCore", "step"), version


def test_the_limit_of_admission_is_there_or_not(versions: Texts) -> None:
    """The versions that have it compare it with those that run; 0.29 has not. A table is printed."""
    for version, texts in versions.items():
        there = "max_num_active_reqs" in signatures.members(texts["Scheduler"], "Scheduler")[1]
        print(f"\nvLLM {version}: max_num_active_reqs {'yes' if there else 'no'}", end="")
        assert ("num_running >= self.max_num_active_reqs" in texts["Scheduler"]) == there
        assert there or version.startswith("0.29"), version


def test_the_queues_limit_is_read_in_the_api_server_alone(versions: Texts) -> None:
    """Neither the scheduler nor the engine core reads it, so no order in the engine core's process could act on it."""
    for version, texts in versions.items():
        assert "scheduler_config.max_num_queued_reqs" in texts["AsyncLLM"], version
        assert "max_num_queued_reqs" not in texts["Scheduler"] + texts["EngineCoreProc"], version
