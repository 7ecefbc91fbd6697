"""The places in vLLM that kvobs hooks, read from the sources of several versions without running them.

Versions come from the environments that ``KVOBS_TEST_VLLM`` names and from the wheels (files, or directories of them,
separated by colons) that ``KVOBS_TEST_VLLM_WHEELS`` names.
"""

from __future__ import annotations

import ast
import os
import sys
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvobs.bus import Bus
from kvobs.sources._patch import Patches
from kvobs.sources.vllm._hooks import SUBJECT, EngineHooks
from tests.vllm_engine import interpreters

WHEELS = "KVOBS_TEST_VLLM_WHEELS"
MODULES = {"BlockPool": "vllm/v1/core/block_pool.py", "KVCacheManager": "vllm/v1/core/kv_cache_manager.py",
           "Scheduler": "vllm/v1/core/sched/scheduler.py", "Request": "vllm/v1/request.py",
           "KVCacheBlock": "vllm/v1/core/kv_cache_utils.py",
           "SingleTypeKVCacheManager": "vllm/v1/core/single_type_kv_cache_manager.py",
           "SchedulerOutput": "vllm/v1/core/sched/output.py"}
# What hooks read from a call by its place: the method's first parameters.
PARAMETERS = {
    "BlockPool.get_new_blocks": "self num_blocks", "BlockPool._maybe_evict_cached_block": "self block",
    "BlockPool.touch": "self blocks", "BlockPool.free_blocks": "self ordered_blocks", "BlockPool.reset_prefix_cache":
    "self", "KVCacheManager.allocate_slots": "self request num_new_tokens num_new_computed_tokens new_computed_blocks",
    "Scheduler.add_request": "self request", "Scheduler.schedule": "self", "Scheduler.update_from_output":
    "self scheduler_output", "Scheduler._preempt_request": "self request", "Scheduler._free_request": "self request",
    "Scheduler._free_blocks": "self request", "Scheduler.finish_requests": "self", "Scheduler.reset_prefix_cache":
    "self reset_running_requests"}
OPTIONAL = {"BlockPool.unpin_blocks": "self blocks", "BlockPool.move_block_hashes": "self src_block dst_block"}
# What hooks read from the objects.
ATTRIBUTES = {
    "BlockPool": "blocks free_block_queue", "KVCacheManager": "block_pool coordinator enable_caching", "Scheduler":
    "requests running waiting kv_cache_manager kv_cache_config max_model_len max_num_running_reqs cache_config "
    "vllm_config", "Request": "request_id status num_computed_tokens num_preemptions num_prompt_tokens num_tokens "
    "num_output_tokens block_hashes trace_headers", "KVCacheBlock": "block_id ref_cnt block_hash is_null",
    "SingleTypeKVCacheManager": "req_to_blocks block_size kv_cache_spec",
    "SchedulerOutput": "num_scheduled_tokens total_num_scheduled_tokens"}
Versions = dict[str, dict[str, tuple[dict[str, list[str]], set[str]]]]


def sources() -> Iterator[tuple[str, dict[str, str]]]:
    """Each version, and the text of its modules by class."""
    for python in interpreters():
        (package,) = Path(python).parent.parent.glob("lib/python3.*/site-packages/vllm")
        (version,) = {path.name.split("-")[1].removesuffix(".dist") for path in package.parent.glob("vllm*.dist-info")}
        yield version, {name: (package.parent / path).read_text("utf-8") for name, path in MODULES.items()}
    for place in filter(None, os.environ.get(WHEELS, "").split(":")):
        for wheel in sorted(Path(place).glob("vllm*.whl")) if Path(place).is_dir() else [Path(place)]:
            with zipfile.ZipFile(wheel) as opened:
                yield wheel.name.split("-")[1], {name: opened.read(path).decode() for name, path in MODULES.items()}


def members(text: str, name: str) -> tuple[dict[str, list[str]], set[str]]:
    """The methods of a class with their parameters, and its attributes (annotated, properties, or set on self)."""
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = {node.name: [one.arg for one in node.args.args] for node in found.body
               if isinstance(node, ast.FunctionDef)}
    attributes = set(methods) | {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)
                                 and isinstance(node.target, ast.Name)}
    attributes |= {node.attr for node in ast.walk(found) if isinstance(node, ast.Attribute)
                   and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self"}
    return methods, attributes


@pytest.fixture(scope="module")
def versions() -> Versions:
    """What each version's classes have."""
    found = {version: {name: members(text, name) for name, text in texts.items()} for version, texts in sources()}
    if not found:
        pytest.skip(f"Neither KVOBS_TEST_VLLM nor {WHEELS} names a vLLM to read.")
    return found


def stand_in(monkeypatch: pytest.MonkeyPatch, methods: dict[str, list[str]], version: str) -> types.ModuleType:
    """Modules with classes that have these methods, named as vLLM's; the scheduler's is returned."""
    classes = {owner: type(owner, (), {name.split(".")[1]: lambda *_, **__: None for name in methods
                                       if name.startswith(f"{owner}.")})
               for owner in ("BlockPool", "KVCacheManager", "Scheduler")}
    for path, contents in {
            "vllm": {"__version__": version}, "vllm.v1": {}, "vllm.v1.core": {}, "vllm.v1.core.sched": {},
            "vllm.v1.request": {"RequestStatus": types.SimpleNamespace(RUNNING=object())},
            "vllm.v1.core.kv_cache_manager": classes, "vllm.v1.core.block_pool": classes,
            "vllm.v1.core.sched.scheduler": classes}.items():
        module = types.ModuleType(path)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, path, module)
    return sys.modules["vllm.v1.core.sched.scheduler"]


def hooked(monkeypatch: pytest.MonkeyPatch, methods: dict[str, list[str]], version: str) -> tuple[set[str], str]:
    """Which of these methods kvobs's hooks replaced in such a version, and what they say is missing."""
    module = stand_in(monkeypatch, methods, version)
    places = {name: (getattr(module, name.split(".")[0]), name.split(".")[1]) for name in methods}
    before = {name: vars(owner)[attribute] for name, (owner, attribute) in places.items()}
    patches = Patches("vllm", lambda _: None)
    desk = types.SimpleNamespace(session_of=str)
    hooks = EngineHooks(types.SimpleNamespace(bus=Bus(1)), lambda _: None, patches, desk)  # type: ignore[arg-type]
    hooks.install()
    try:
        changed = {name for name, (owner, attribute) in places.items() if vars(owner)[attribute] is not before[name]}
        (fact,) = hooks.availability()
        assert fact.subject == SUBJECT
        assert fact.available == (not fact.reason)
        return changed, fact.reason
    finally:
        hooks.uninstall()
        patches.restore()
        assert all(vars(owner)[attribute] is before[name] for name, (owner, attribute) in places.items())


def test_every_version_has_what_the_hooks_take(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each place to hook has the parameters that are read by their place, and the hooks take all that are there."""
    print(f"\n{'':42}" + "".join(f"{version:>9}" for version in versions))
    for name in {**PARAMETERS, **OPTIONAL}:
        owner, method = name.split(".")
        there = ["yes" if method in found[owner][0] else "-" for found in versions.values()]
        print(f"{name:42}" + "".join(f"{one:>9}" for one in there))
    for version, found in versions.items():
        for name, first in {**PARAMETERS, **OPTIONAL}.items():
            owner, method = name.split(".")
            parameters = found[owner][0].get(method)
            if parameters is None:
                assert name in OPTIONAL, f"vLLM {version} has no {name}."
            else:
                assert parameters[:len(first.split())] == first.split(), (version, name)
        methods = {f"{owner}.{method}": parameters for owner in ("BlockPool", "KVCacheManager", "Scheduler")
                   for method, parameters in found[owner][0].items()}
        changed, reason = hooked(monkeypatch, methods, version)
        assert reason == ""
        assert changed == {name for name in {**PARAMETERS, **OPTIONAL} if name in methods} | {"Scheduler.__init__"}


def test_every_version_has_the_attributes_that_are_read(versions: Versions) -> None:
    """Tables, counts and states of requests and blocks are where the hooks look for them."""
    for version, found in versions.items():
        for owner, names in ATTRIBUTES.items():
            assert set(names.split()) <= found[owner][1], (version, owner)


@pytest.mark.parametrize("lacking", sorted(PARAMETERS))
def test_a_version_without_a_place_is_named_and_left_alone(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one place is missing nothing is patched, and the availability says which and in what version."""
    methods = {name: [] for name in {**PARAMETERS, **OPTIONAL, "Scheduler.__init__": ""} if name != lacking}
    changed, reason = hooked(monkeypatch, methods, "0.99")
    assert changed == set()
    assert reason == f"The scheduler of vLLM 0.99 is not one that kvobs knows (0.29 to 0.32): {lacking} not found."


def test_places_that_only_newer_versions_have_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the two methods that older versions lack, the others are hooked and nothing is said to be missing."""
    changed, reason = hooked(monkeypatch, {name: [] for name in [*PARAMETERS, "Scheduler.__init__"]}, "0.23")
    assert (changed, reason) == ({*PARAMETERS, "Scheduler.__init__"}, "")
