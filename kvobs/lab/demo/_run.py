"""The demo from its first line to its exit code."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvobs.lab.demo import _script
from kvobs.lab.demo._cache import prepared
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._observer import Observer
from kvobs.lab.demo._progress import say, stage
from kvobs.lab.demo._report import print_table, record
from kvobs.model import Turn

INTERRUPTED = 130


def run(turns: int = 8, as_json: bool = False, *, deep: bool = False, model: Path | None = None) -> int:
    """Hold the conversation, and say what kvobs saw of it.

    Args:
        turns: how many turns, 1 to 64.
        as_json: one JSON object per turn on stdout and nothing else there, instead of the conversation and a table.
        deep: sample attention as well, whatever the setting says.
        model: a checkpoint directory with a chat template; the default is SmolLM2-135M-Instruct, prepared if needed.
    Returns:
        The exit code: 0, 2 after a refusal (one sentence on stderr), 130 after an interrupt.
    Raises:
        kvobs.config.ConfigError: a setting of kvobs was refused.
    """
    try:
        if not 1 <= turns <= _script.MOST_TURNS:
            raise DemoError(f"The demo's number of turns is {turns}; allowed is 1 to {_script.MOST_TURNS}.")
        directory = prepared() if model is None else model
        _converse(directory, turns, as_json, deep)
    except DemoError as error:
        say(f"kvobs: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say("kvobs: Interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has read enough; what Python flushes at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _converse(directory: Path, turns: int, as_json: bool, deep: bool) -> None:
    observer = Observer(deep=deep)
    try:
        with stage(f"Loading {directory.name}"):
            from kvobs.lab.demo import _chat

            chat = _chat.Chat(directory, _script.NEW_TOKENS)
        if observer.metrics is not None:
            say(f"Metrics are served at {observer.metrics} while the demo runs.")
        seen: list[Turn] = []
        with _chat.one_thread():
            for number, line in enumerate(_script.lines(turns), start=1):
                if as_json:
                    with stage(f"Turn {number} of {turns}"):
                        text = chat.say(line)
                else:
                    print(f"\nYou: {line}\nModel: ", end="", flush=True)
                    text = chat.say(line, _write)
                    print(flush=True)
                seen.append(observer.turn())
                if as_json:
                    print(json.dumps(record(seen[-1], text)), flush=True)
        if not as_json:
            print_table(seen)
            print("\n" + "\n".join(observer.places()), flush=True)
    finally:
        observer.close()


def _write(piece: str) -> None:
    print(piece, end="", flush=True)
