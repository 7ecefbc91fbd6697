"""The demo from its first line to its exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from kvobs.lab.demo import _script
from kvobs.lab.demo._cache import prepared
from kvobs.lab.demo._device import Place, choose
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._observer import Observer
from kvobs.lab.demo._progress import say, stage
from kvobs.store import StoreError

INTERRUPTED = 130


def run(turns: int = 8, as_json: bool = False, *, deep: bool = False, model: Path | None = None,
        device: str = "auto") -> int:
    """Hold the conversations, and say what kvobs saw of them.

    Args:
        turns: how many turns the main one has, 1 to 64; in each round one of two short ones has a turn as well.
        as_json: one JSON object per turn on stdout and nothing else there, instead of the conversations and tables.
        deep: sample attention as well, whatever the setting says.
        model: a checkpoint directory with a chat template; the default is SmolLM2-135M-Instruct, prepared if needed.
        device: ``vgpu``, ``cpu``, or ``auto`` for the first of them that can be had.
    Returns:
        The exit code: 0, 2 after a refusal (one sentence on stderr), 130 after an interrupt.
    Raises:
        kvobs.config.ConfigError: a setting of kvobs was refused.
    """
    def converse() -> int:
        if not 1 <= turns <= _script.MOST_TURNS:
            raise DemoError(f"The demo's number of turns is {turns}; allowed is 1 to {_script.MOST_TURNS}.")
        place = choose(device)
        directory = prepared() if model is None else model
        (say if as_json else print)(place.sentence)
        _converse(directory, place, turns, as_json, deep)
        return 0

    return ending(converse)


def ending(body: Callable[[], int]) -> int:
    """What ``body`` returns as the exit code, or the one of the way in which it ended early, said in a sentence."""
    try:
        return body()
    except DemoError as error:
        say(f"kvobs: {error}")
        return error.exit_code
    except StoreError as error:  # the disk is full, say: the store's own warning came before
        say(f"kvobs: {error}")
        return 1
    except KeyboardInterrupt:
        say("kvobs: Interrupted.")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has read enough; what Python flushes at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _converse(directory: Path, place: Place, turns: int, as_json: bool, deep: bool) -> None:
    observer = Observer(deep=deep)
    try:
        with stage(f"Loading {directory.name}"):
            from kvobs.lab.demo import _chat
            from kvobs.lab.demo._report import print_tables

            model = _chat.Model(directory, place.devices)
            chats = {name: _chat.Chat(model, place.devices[0]) for name in (_script.MAIN, *_script.SIDES)}
        if observer.metrics is not None:
            say(f"Metrics are served at {observer.metrics} while the demo runs.")
        seen: list[dict[str, Any]] = []
        with _chat.one_thread():
            for spoken in _script.schedule(turns):
                if spoken.round == turns // 2 + 1 and chats[_script.MAIN].device != place.devices[-1]:
                    chats[_script.MAIN].move(place.devices[-1])  # once half of its turns are over
                seen.append(_turn(observer, place, chats[spoken.conversation], spoken, turns, as_json))
                if as_json:
                    print(json.dumps(seen[-1]), flush=True)
        if not as_json:
            print_tables(seen, on_cpu=not place.is_virtual)
            print("\n" + "\n".join([*_moves(seen, place), *observer.places()]), flush=True)
    finally:
        observer.close()


def _turn(observer: Observer, place: Place, chat: Any, spoken: _script.Spoken, turns: int,
          as_json: bool) -> dict[str, Any]:
    """One line, its reply, and what kvobs recorded of both."""
    from kvobs.lab.demo._allocator import Held, look
    from kvobs.lab.demo._report import record
    from kvobs.sessions import session

    if not chat.has_room(spoken.line, spoken.new_tokens):
        chat.begin()
    name = spoken.conversation if chat.begun == 1 else f"{spoken.conversation} {chat.begun}"
    if not as_json:
        print(f"\n[{spoken.conversation}, {chat.device}]\nYou: {spoken.line}\nModel: ", end="", flush=True)
    with stage(f"Round {spoken.round} of {turns}: {name}") if as_json else nullcontext(), session(name):
        text = chat.say(spoken.line, spoken.new_tokens, None if as_json else _write)
    if not as_json:
        print(flush=True)
    turn = observer.turn()
    if place.is_virtual:
        held = look(chat.device)
    else:
        usage = observer.usage(chat.device)
        used = usage.get("allocated")
        held = Held(None if used is None else used + usage.get("unused", 0), used)
    moved = [move for move in observer.migrations() if move.cache_id == turn.cache_id]
    return record(turn, text, spoken.conversation, held, observer.verdict(chat.device), moved)


def _moves(seen: list[dict[str, Any]], place: Place) -> list[str]:
    """What kvobs saw move between the virtual devices, beside the copies that these counted themselves."""
    if not place.is_virtual or not any(one["migrations"] for one in seen):
        return []
    import torch

    src, dst = place.devices[0], place.devices[-1]
    count, size = torch.vgpu.copies().get((src, dst), (0, 0))
    buffers, total = (sum(one[name] for one in seen) for name in ("migrations", "bytes_migrated"))
    return [f"Migration: kvobs saw {buffers} buffers and {total:,} bytes go from {src} to {dst}; the virtual GPU "
            f"itself counted {count} copies and {size:,} bytes."]


def _write(piece: str) -> None:
    print(piece, end="", flush=True)
