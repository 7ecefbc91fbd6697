"""Scenes on the virtual GPU: the public functions of a module, run one after the other in a process of their own."""

from __future__ import annotations

import functools
import importlib
import inspect
import traceback
from typing import Any

from tests.vgpu import on_vgpu


def play(module: str, only: list[str] | None) -> dict[str, Any]:
    """What each scene of a module returns (JSON), or how it failed."""
    import torch

    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for name, scene in list(vars(importlib.import_module(module)).items()):
        if not inspect.isfunction(scene) or scene.__module__ != module or name.startswith("_"):
            continue
        if only is None or name in only:
            try:
                seen[name] = scene()
            except Exception:
                seen[name] = {"failed": traceback.format_exc(limit=-6)}
    return seen


def _remote(module, only):  # sent by its source, without this module's imports
    from tests.vgpu_scenes import play

    return play(module, only)


@functools.cache
def _seen(module: str, only: tuple[str, ...] | None) -> dict[str, Any]:
    try:
        seen: dict[str, Any] = on_vgpu(_remote, module=module, only=only, timeout=600)
    except AssertionError as error:  # kept too: each of its tests would run it again
        return {"failed": str(error)}
    return seen


def scene(module: str, name: str, among: tuple[str, ...] | None = None) -> Any:
    """What one scene saw; those among which it is run share a process (None: all of the module)."""
    found = _seen(module, among)
    seen = found if "failed" in found else found[name]
    if isinstance(seen, dict) and "failed" in seen:
        raise AssertionError(seen["failed"])
    return seen
