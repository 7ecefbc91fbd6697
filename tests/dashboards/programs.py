"""The programs of the incidents: each serves a tiny model calmly, has its trouble when it is told to, and goes on.

Run as ``kvobs run … -- python -m tests.dashboards.programs NAME``. It says ``ready`` on stdout once it serves; lines
on stdin (``calm``, ``incident``, ``after``) say what to play from now on, and it ends with its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from kvobs.asgi import BreakerMiddleware, ErrorMiddleware
from kvobs.lab.scenarios import fragmentation as fragmented
from kvobs.lab.scenarios import oom
from kvobs.lab.scenarios._engine import MIB, Engine
from kvobs.sources.transformers._between import Between

TURN_EVERY_S = 0.5
CUT = 300  # tokens
Play = Callable[[], object]
KEPT: list[Any] = []


def resident(engine: Engine, device: int = 0) -> Engine:
    """The engine, with a session of 64 MiB that stays."""
    cache = engine.static(oom.TOKENS)
    engine.turn("resident", cache, device=device)
    KEPT.append(cache)
    return engine


class Chat:
    """Sessions that take turns, over caches that grow; one that has become long begins anew."""

    longest = 20  # turns

    def __init__(self, engine: Engine, sessions: int = 2, name: str = "chat") -> None:
        self.engine = engine
        self.caches: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.turns, self._sessions, self._name = 0, sessions, name

    def turn(self, device: int = 0) -> Any:
        """The next session's turn; its cache."""
        name = f"{self._name} {self.turns % self._sessions}"
        if self.turns // self._sessions % self.longest == 0:
            self.caches[name], self.seen[name] = self.engine.dynamic(), None
        self.seen[name] = self.engine.turn(name, self.caches[name], self.seen[name], device)
        self.turns += 1
        return self.caches[name]


def calm() -> dict[str, Play]:
    """Nothing happens: what is held is much, so that what is left over is a small share of it."""
    chat = Chat(resident(Engine()))
    return {"calm": chat.turn}


def fragmentation() -> dict[str, Play]:
    """Six of ten sessions end, and one that wants buffers of 24 MiB cannot begin: the rest pins all segments."""
    import torch

    engine, sessions = Engine(), dict[str, Any]()
    chat = Chat(engine)

    def begin() -> None:
        for number in range(fragmented.SESSIONS):
            if f"short {number}" not in sessions:
                sessions[f"short {number}"] = engine.static(fragmented.SHORT)
                engine.turn(f"short {number}", sessions[f"short {number}"])

    def incident() -> None:
        for number in set(range(fragmented.SESSIONS)) - set(fragmented.STAY):
            sessions.pop(f"short {number}", None)
        with contextlib.suppress(torch.OutOfMemoryError):
            engine.turn("long", engine.static(fragmented.LONG))
        chat.turn()

    def after() -> None:
        begin()
        chat.turn()

    begin()
    return {"calm": chat.turn, "incident": incident, "after": after}


def capacity() -> dict[str, Play]:
    """Three sessions hold nearly all there is, and a fourth cannot begin, however memory is laid out."""
    import torch

    engine, sessions = Engine(), dict[str, Any]()
    chat = Chat(engine)

    def begin(number: int) -> None:
        if number not in sessions:
            cache = engine.static(oom.TOKENS)
            engine.turn(f"session {number}", cache)
            sessions[number] = cache

    def incident() -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            for number in range(oom.SESSIONS + 1):
                begin(number)
        chat.turn()

    def after() -> None:
        if sessions.pop(oom.SESSIONS - 1, None) is not None:
            torch.accelerator.empty_cache()
        chat.turn()

    for number in range(oom.SESSIONS - 1):
        begin(number)
    return {"calm": chat.turn, "incident": incident, "after": after}


def migration() -> dict[str, Play]:
    """A session rests in host memory between its turns, and has each turn on the other device."""
    import torch

    engine = resident(resident(Engine(devices=2)), device=1)
    chat, traveller = Chat(engine, sessions=1), Chat(engine, sessions=1, name="traveller")

    def incident() -> None:
        chat.turn()
        for device in (0, 1):
            for layer in traveller.turn(device).layers:
                layer.offload()
                layer.device = torch.device(f"vgpu:{1 - device}")
                layer.prefetch()

    return {"calm": chat.turn, "incident": incident}


def latency() -> dict[str, Play]:
    """Sessions begin and end with all of their memory: each maps it anew, which takes longer than 12 ms."""
    import torch

    from kvobs import virtual

    chat, asked = Chat(resident(Engine()), sessions=1), itertools.count()
    virtual.change_settings("expandable_segments:True")

    def incident() -> None:
        if next(asked) % 4 == 0:
            chat.turn()
        for _ in range(14):
            torch.empty(48 * MIB, dtype=torch.uint8, device="vgpu:0")
            torch.accelerator.empty_cache()

    return {"calm": chat.turn, "incident": incident}


def telemetry() -> dict[str, Play]:
    """A cache is cut token by token, faster than so short a queue is read: events are dropped and counted."""
    import torch

    chat = Chat(resident(Engine()), sessions=1)

    def incident() -> None:
        chat.turn()
        cut = chat.engine.dynamic()
        chat.engine.turn("cut", cut, torch.zeros(1, CUT, dtype=torch.long))
        for _ in range(CUT):
            cut.crop(-1)

    def after() -> None:
        """A hook fails, once the queue is read again, and is detached."""
        if not failed and next(afterwards) == 6:
            failed.append(mock.patch.object(Between, "rewritten", side_effect=RuntimeError("planted")))
            with failed[0]:
                chat.caches["chat 0"].crop(-1)
                chat.seen["chat 0"] = chat.seen["chat 0"][:, :-1]
        chat.turn()

    failed: list[Any] = []
    afterwards = itertools.count()
    return {"calm": chat.turn, "incident": incident, "after": after}


def throttled() -> dict[str, Play]:
    """Observation may take a thousandth of the time, which it cannot keep: everything passes through unobserved."""
    return {"calm": Chat(Engine(), sessions=1).turn}


def pressure() -> dict[str, Play]:
    """Long sessions, more than fit: the breaker moves those that rest to host memory, and admits fewer.

    The driver takes its time to give memory back, so that this action ends after its limit of 0.2 s.
    """
    import torch

    empty_cache = torch.accelerator.empty_cache

    def slow() -> None:
        empty_cache()
        threading.Event().wait(0.3)

    torch.accelerator.empty_cache = slow
    engine, asked = Engine(), itertools.count()
    caches, seen = dict[str, Any](), dict[str, Any]()

    def turn(name: str) -> None:
        if name not in seen:
            caches[name], seen[name] = engine.dynamic(), torch.zeros(1, 1200, dtype=torch.long)
        try:
            seen[name] = engine.turn(name, caches[name], seen[name])
        except torch.OutOfMemoryError:
            del caches[name], seen[name]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        turn(dict(scope["headers"])[b"kvobs-session"].decode())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guarded = ErrorMiddleware(BreakerMiddleware(app))

    async def ask(name: str, priority: str) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"max_tokens": 4}', "more_body": False}

        async def send(message: Any) -> None:
            pass

        given = {b"content-type": b"application/json", b"kvobs-session": name.encode(),
                 b"kvobs-priority": priority.encode()}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await guarded({"type": "http", "method": "POST", "path": "/v1/chat/completions",
                               "client": ("127.0.0.1", 5), "headers": list(given.items())}, receive, send)

    def play(sessions: int) -> None:
        number = next(asked) % sessions
        asyncio.run(ask(f"long {number}", ("normal", "sheddable", "critical")[number % 3]))
        for name in [name for name in seen if int(name.removeprefix("long ")) >= sessions]:
            del caches[name], seen[name]

    return {"calm": lambda: play(3), "incident": lambda: play(14), "after": lambda: play(3)}


def preemption() -> dict[str, Play]:
    """A paged pool serves one request at a time, then five at once that do not fit: they take each other's blocks."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=97, max_position_embeddings=512, name_or_path="kvobs-scenario"))
    model.set_attn_implementation("sdpa")
    words = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=-1)
    pool = ContinuousBatchingConfig(page_size=16, num_blocks=10, max_batch_tokens=64)
    manager = model.eval().init_continuous_batching(generation_config=words, continuous_batching_config=pool)
    manager.start()
    asked = iter(range(1_000_000))

    def ask(count: int) -> None:
        waiting = set[str]()
        for _ in range(count):
            number = next(asked)
            waiting.add(manager.add_request([(7 * number + column) % 97 for column in range(20)],
                                            request_id=f"request {number}"))
        while waiting:
            found = manager.get_result(timeout=10)
            if found is not None and found.is_finished():
                waiting.discard(found.request_id)

    return {"calm": lambda: ask(1), "incident": lambda: ask(5), "end": lambda: manager.stop(block=True, timeout=30)}


PROGRAMS = {made.__name__: made for made in (
    calm, fragmentation, capacity, migration, latency, telemetry, throttled, pressure, preemption)}


def main(name: str, every_s: float = TURN_EVERY_S) -> None:
    """Play a program by the orders on stdin until it is closed."""
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    orders: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line.strip())
        orders.put("end")

    plays = PROGRAMS[name]()
    plays["calm"]()
    print("ready", flush=True)
    threading.Thread(target=listen, name="orders", daemon=True).start()
    phase, due = "calm", time.monotonic()
    while phase != "end":
        due = max(due + every_s, time.monotonic())
        plays.get(phase, plays["calm"])()
        try:
            phase = orders.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            continue
    plays.get("end", lambda: None)()


if __name__ == "__main__":
    main(sys.argv[1])
