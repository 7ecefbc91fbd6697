"""SGLang's real classes, imported from its unzipped wheel: what needs CUDA or is not installed is stubbed.

``scripts/sglang_env.sh DIRECTORY`` unzips the wheel; ``KVOBS_TEST_SGLANG`` names that directory. The classes are
imported in a process of their own (``tests/sglang_child.py``), since stubs must not reach other tests.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support import run_python

VARIABLE = "KVOBS_TEST_SGLANG"
# Of the protocol only the names are needed; it would bring the OpenAI client.
STUBS = frozenset({"torchvision", "triton", "IPython", "tvm_ffi", "sentencepiece", "compressed_tensors", "aiohttp",
                   "dill", "pybase64", "zmq", "orjson", "setproctitle", "partial_json_parser",
                   "sglang.srt.entrypoints.openai.protocol"})


def directory() -> Path:
    """Where the unzipped wheel is, or a skip that says how to make it."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        pytest.skip(f"{VARIABLE} names no directory with SGLang's wheel; scripts/sglang_env.sh makes one.")
    found = Path(named)
    if not (found / "sglang" / "srt").is_dir():
        pytest.skip(f"{VARIABLE} is {named}, where no unzipped wheel of SGLang is.")
    return found


@functools.cache
def told() -> dict[str, Any]:
    """What the programs of ``tests/sglang_child.py`` saw, run once in a process of their own."""
    done = run_python("from tests import sglang_child; sglang_child.main()", **{
        VARIABLE: str(directory()), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": ""})
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _anything(name))
        return getattr(cls, name)


def _anything(name: str) -> Any:
    return _Anything(name, (), {
        "__init__": lambda self, *_, **__: None, "__init_subclass__": classmethod(lambda cls, **_: None),
        "__class_getitem__": classmethod(lambda cls, _: cls)})


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _anything(name))
        return getattr(self, name)


def _decorator(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else lambda given: given


class _Finder:
    """Puts a stub where a package is not needed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        stubbed = name in STUBS or name.split(".")[0] in STUBS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stubbed else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _Stub(spec.name)
        module.__path__ = []
        module.__version__ = "3.4.0"
        if spec.name == "triton":
            module.jit = _decorator
            module.autotune = module.heuristics = lambda *_, **__: lambda given: given
            module.cdiv = lambda a, b: -(-a // b)
        if spec.name == "dill":
            module.dumps = lambda _: b""
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def importable(unzipped: Path) -> None:
    """Make ``import sglang`` work in this process."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    sys.path.insert(0, str(unzipped))


def source_of(module: str) -> str:
    """The source text of a module of the wheel, for those that cannot be imported."""
    return directory().joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")


__all__ = ["directory", "importable", "source_of", "told"]
