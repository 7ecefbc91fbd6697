"""Runs at the start of every Python process below ``kvobs run``, whose PYTHONPATH names this directory.

It may run in an interpreter that is older than kvobs supports or that has no kvobs: keep it plain. kvobs's own
packages are never put on another interpreter's path; such a process is not observed and says so.
"""

import sys


def _chain() -> None:
    """Run the sitecustomize that this one hides, under its own name; what it raises is its own affair."""
    from importlib.machinery import PathFinder

    here = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry.rstrip("/") != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _arm() -> None:
    try:
        from kvobs.autostart import arm

        arm()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"kvobs: {sys.executable} is not observed: it cannot import kvobs ({reason}).\n")


try:
    _chain()
finally:
    _arm()
