"""Running out of memory under a memory fraction: by sessions, in fragments, and for want of bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tests.gpu._checks import check, said
from tests.gpu._model import Served, conversation, lines
from tests.gpu._serving import named

MIB = 1 << 20
ROOM, TINY_ROOM = 96 * MIB, 24 * MIB  # what sessions may take beyond the weights
PROMPT, TINY_PROMPT, MOST_SESSIONS = 512, 384, 60
HOLES, HOLE, ASKED = 48, 3 * MIB, 32 * MIB  # more than a hole in any shared segment, which has 20 MiB
RATION_S = 1.2  # kvobs records one error per second


class Failures:
    """Every failure as the allocator's observer sees it: before the error is raised, when nothing has been freed."""

    def __init__(self, device: Any) -> None:
        self.seen: list[dict[str, int]] = []
        self._device = device
        device.watch_out_of_memory(self._ran_out)

    def _ran_out(self, _index: int, requested: int, allowed: int, free: int) -> None:
        try:
            stats = self._device.stats()
            now = {name: int(stats[f"{name}_bytes.all.current"]) for name in ("reserved", "allocated", "active")}
            self.seen.append({"requested": requested, "allowed": allowed, "device_free": free} | now)
        except Exception as error:  # it must not replace torch's own
            self.seen.append({"requested": requested, "allowed": allowed, "device_free": free, "failed": 1})
            print(f"the observer failed: {type(error).__name__}: {error}", flush=True)


def run_out(device: Any, label: str, expected: str | None, attempt: Callable[[], object],
            failures: Failures) -> dict[str, Any]:
    """Attempt something that must run out of memory; what torch said of it, and what its observer saw."""
    before, message = len(failures.seen), None
    try:
        attempt()
    except device.torch.OutOfMemoryError as error:
        message = str(error)
    return {"label": label, "expected": expected, "ran_out": message is not None, "failures": failures.seen[before:],
            "said": said(message or "")}


def crowd(served: Served, prompt: int) -> None:
    """Open sessions of ``prompt`` made-up tokens until there is no room for another."""
    kept = []
    for number in range(MOST_SESSIONS):
        kept.append(conversation(served, number))
        with named(number):
            kept[-1].say("", prompt, 2)


def perforate(device: Any) -> list[Any]:
    """Fill segments with blocks, and free every other one: holes that nothing larger fits."""
    blocks = [device.torch.empty(HOLE, dtype=device.torch.uint8, device=device.device) for _ in range(HOLES)]
    return blocks[::2]


def exhaust(device: Any, served: Served, tiny: bool) -> dict[str, Any]:
    """Three failures while the history is recorded, and one more without it, so that kvobs may look."""
    failures = Failures(device)
    conversation(served, 0).say("", 8, 2)  # libraries take their workspaces at first use
    device.settle()
    room, prompt = (TINY_ROOM, TINY_PROMPT) if tiny else (ROOM, PROMPT)
    device.limit(room)
    found = [run_out(device, "sessions", None, lambda: crowd(served, prompt), failures)]
    device.settle()
    device.module.empty_cache()
    device.unlimit()
    holes = perforate(device)
    device.settle()
    device.limit(MIB)
    ask = _asking(device, ASKED)
    found.append(run_out(device, "fragments", "FRAGMENTED", ask, failures))
    found.append(run_out(device, "bytes", "CAPACITY", _asking(device, 4 << 30), failures))
    return {"failures": found, "again": ask, "keep": holes, "seen": failures, "free_in_holes": HOLES // 2 * HOLE}


def again_without_history(device: Any, served: Served, observed: Any, told: dict[str, Any]) -> dict[str, Any]:
    """The failure in fragments once more: kvobs records it with a verdict, since no history is there to resolve."""
    device.stop_recording()
    threading.Event().wait(RATION_S)
    one = run_out(device, "fragments again", "FRAGMENTED", told["again"], told["seen"])
    flights = observed.flights()
    checks = [check("ran out again", True, one["ran_out"])]
    if flights is not None:
        last = flights[-1] if flights else {}
        checks += [check("the last flight record has a snapshot", True, last.get("has_snapshot")),
                   check("the last flight record's verdict", "FRAGMENTED", last.get("verdict"))]
    told["keep"].clear()  # every hole's neighbours
    device.settle()
    fits = run_out(device, "after freeing", None, told["again"], told["seen"])
    checks.append(check("the same request fits once the blocks between the holes are free", False, fits["ran_out"]))
    device.unlimit()
    next_step = _one_more_step(device, served, observed, checks)
    return {"again": one, "flights": flights, "next_step": next_step, "checks": checks}


def _one_more_step(device: Any, served: Served, observed: Any, checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With all memory allowed again: what kvobs says of the next step of a session, and that step."""
    session = conversation(served, MOST_SESSIONS)
    session.say(lines(0), TINY_PROMPT, 2)
    foreseen: list[dict[str, Any]] = observed.next_step(device.name)
    session.say(lines(1), 1, 1)
    if foreseen:
        checks.append(check("the next step was foreseen to succeed, and did", True,
                            foreseen[0]["verdict"] in ("SERVED", "GROW", "RECLAIM")))
    return foreseen


def _asking(device: Any, size: int) -> Callable[[], object]:
    return lambda: device.torch.empty(size, dtype=device.torch.uint8, device=device.device)
