"""What kvobs could leave behind in a process: a picture before a test, and the difference after it."""

from __future__ import annotations

import contextvars
import logging
import os
import sys
import threading
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import kvobs

_OURS = os.path.dirname(os.path.abspath(kvobs.__file__)) + os.sep
# Third-party modules in which kvobs replaces attributes of classes, or functions.
_WATCHED = ("transformers.cache_utils", "transformers.modeling_utils", "transformers.generation",
            "transformers.integrations", "torch.nn.modules.module", "torch.cuda.memory", "torch.cuda.graphs")
_HOOK_TABLES = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


@dataclass
class Picture:
    """Everything watched, by identity."""

    attributes: dict[tuple[str, str], object] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    context: dict[str, object] = field(default_factory=dict)
    singles: dict[str, object] = field(default_factory=dict)


def take() -> Picture:
    """The state of this process now."""
    return Picture(_attributes(), _environment(), _context(), _singles())


def left_since(before: Picture) -> list[str]:
    """What of kvobs is there that was not there before; whole phrases."""
    left = [f"thread {thread.name}" for thread in _threads() if not _ended(thread)]
    runtime = sys.modules.get("kvobs.runtime")
    if runtime is not None and runtime.current() is not None:
        left.append("a running runtime")
    now = take()
    for (owner, name), value in now.attributes.items():
        if (owner, name) in before.attributes and before.attributes[owner, name] is not value:
            left.append(f"{owner}.{name} is another object than before")
        elif _is_ours(value):
            left.append(f"{owner}.{name} is a hook of kvobs")
    watched = {owner for owner, _ in now.attributes}
    left += [f"{owner}.{name} is gone" for owner, name in before.attributes.keys() - now.attributes.keys()
             if owner in watched]
    if now.environment != before.environment:
        left.append(f"environment variables {sorted(set(now.environment.items()) ^ set(before.environment.items()))}")
    left += [f"context variable {name} = {value!r}" for name, value in now.context.items()
             if value is not before.context.get(name) and value]
    left += [f"{name} is {value!r}, was {before.singles[name]!r}" for name, value in now.singles.items()
             if name in before.singles and before.singles[name] != value]
    return left


def clean_up() -> None:
    """Stop what a failed test left running, so that the next test is judged by itself."""
    runtime = sys.modules.get("kvobs.runtime")
    if runtime is not None:
        runtime.stop()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvobs")]


def _ended(thread: threading.Thread) -> bool:
    thread.join(timeout=5)
    return not thread.is_alive()


def _is_ours(value: object) -> bool:
    """Is it, or does it wrap, a function whose code lies in the kvobs package?"""
    seen = 0
    while value is not None and seen < 20:
        code = value.__code__ if isinstance(value, FunctionType) else None
        if code is not None and code.co_filename.startswith(_OURS):
            return True
        value, seen = vars(value).get("__wrapped__") if hasattr(value, "__dict__") else None, seen + 1
    return False


def _watched_modules() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items())
            if module is not None and any(name == w or name.startswith(w + ".") for w in _WATCHED)]


def _attributes() -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {}
    for module in _watched_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType):
                found[module.__name__, name] = value
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, own in list(vars(value).items()):
                    if not attribute.startswith("_abc") and callable(getattr(own, "__func__", own)):
                        found[f"{module.__name__}.{name}", attribute] = own
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items()
            if name.startswith(("KVOBS_", "OTEL_")) or name == "PYTHONPATH"}


def _context() -> dict[str, object]:
    return {variable.name: value for variable, value in contextvars.copy_context().items()
            if variable.name.startswith(("kvobs", "current_context"))}


def _singles() -> dict[str, Any]:
    log = logging.getLogger("kvobs")
    singles: dict[str, Any] = {
        "the kvobs logger": (log.level, tuple(log.handlers), log.propagate, log.disabled),
        "sys.meta_path (kvobs's finders)": [f for f in sys.meta_path if type(f).__module__.startswith("kvobs")],
    }
    for library in ("trace", "metrics._internal"):
        module = sys.modules.get(f"opentelemetry.{library}")
        for name in ("_TRACER_PROVIDER", "_METER_PROVIDER"):
            if module is not None and hasattr(module, name):
                singles[f"opentelemetry.{library}.{name}"] = getattr(module, name)
    hooks = sys.modules.get("torch.nn.modules.module")
    for table in _HOOK_TABLES:
        if hooks is not None and hasattr(hooks, table):
            singles[f"torch's {table}"] = list(getattr(hooks, table))
    return singles
