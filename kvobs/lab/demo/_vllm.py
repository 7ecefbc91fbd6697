"""``kvobs demo --engine vllm`` from its first line to its exit code."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from kvobs import config as configuration
from kvobs.lab.demo import _vllm_script as script
from kvobs.lab.demo._cache import prepared
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._progress import say
from kvobs.lab.demo._run import ending
from kvobs.lab.demo._vllm_env import environment, python_of
from kvobs.lab.demo._vllm_process import serve
from kvobs.lab.demo._vllm_report import figures, print_json, print_tables, sessions


def run(*, directory: Path | None = None, yes: bool = False, as_json: bool = False, model: Path | None = None) -> int:
    """Serve two-turn sessions with a real vLLM under KV pressure; say what it said and what happened.

    Args:
        directory: the environment with vLLM; None for one in the user's cache, which is made on request.
        yes: an environment may be made without asking.
        as_json: JSON lines on stdout and nothing else there, instead of tables.
        model: a checkpoint directory with a chat template; the default is SmolLM2-135M-Instruct, prepared if needed.
    Returns:
        The exit code: 0, 1 where vLLM failed, 2 after a refusal (one sentence on stderr), 130 after an interrupt.
    Raises:
        kvobs.config.ConfigError: a setting of kvobs was refused.
    """
    def body() -> int:
        config = configuration.load()
        if not config.enabled:
            raise DemoError("The demo shows what kvobs observes, and the setting enabled switches it off.")
        place, found = environment(directory, consent=lambda sentence: yes or _agreed(sentence))
        checkpoint = prepared() if model is None else model
        with ExitStack() as kept:
            store = config.store if config.store is not None else Path(
                kept.enter_context(tempfile.TemporaryDirectory(prefix="kvobs-demo-")))
            (say if as_json else print)(
                f"vLLM {found.vllm} with {checkpoint.name} on the CPU: {len(script.DIALOGUES)} sessions of "
                f"{script.TURNS} turns share {script.POOL_BLOCKS} KV blocks of {script.BLOCK_TOKENS} tokens, too few "
                "for all at once.")
            told = serve(python_of(place), checkpoint.absolute(),
                         {"store": str(store.absolute()), "session_ids": "plain", "virtual_gpu": "off"})
            lines, rows = figures(told, store), sessions(told, store)
            if as_json:
                print_json(told, lines, rows)
            else:
                print_tables(lines, rows)
                print(f"\nStore: {store} (process {told.process}); look at it with: kvobs view {store}"
                      if config.store is not None else
                      "\nStore: off, as configured; the demo used one of its own and removed it.", flush=True)
        return 0

    return ending(body)


def _agreed(sentence: str) -> bool:
    """Whether a person at a terminal says yes; nobody else is asked."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say(f"kvobs: {sentence}")
        return False
    print(f"{sentence} Install it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
