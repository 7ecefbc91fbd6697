"""What the middleware for errors costs: per request that ends well, per part of a stream, and per failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.util import setup_testing_defaults

from kvobs.errors import classify
from kvobs.errors._asgi import ErrorMiddleware
from kvobs.wsgi import ErrorMiddleware as WsgiMiddleware
from tests.bench._rows import Plan, Progress, Row, compared, repeated

GROUP = "errors"
BUDGET_US = 20.0
NUMBER = 500
PARTS = 100


def _asgi(app: Any, number: int) -> float:
    """Nanoseconds of CPU per request, from call to return."""
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    body = {"type": "http.request", "body": b"{}", "more_body": False}

    async def receive() -> Any:
        return body

    async def send(message: Any) -> None:
        pass

    async def run() -> float:
        failed, began = 0, time.thread_time_ns()
        for _ in range(number):
            try:
                await app(scope, receive, send)
            except TimeoutError:
                failed += 1
        return (time.thread_time_ns() - began) / number if failed in (0, number) else float("nan")

    return asyncio.run(run())


def _app(parts: int, *, fails: bool = False) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for left in reversed(range(parts)):
            await send({"type": "http.response.body", "body": b"x", "more_body": left > 0})
        if fails:
            raise TimeoutError("late")

    return app


def _wsgi(app: Any, number: int) -> float:
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    began = time.thread_time_ns()
    for _ in range(number):
        answer = app(environ, lambda status, headers, exc_info=None: lambda data: None)
        for _part in answer:
            pass
        answer.close()
    return (time.thread_time_ns() - began) / number


def _wsgi_app(environ: Any, start_response: Any) -> Iterator[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    yield b"x"


def _wrapped() -> BaseException:
    try:
        try:
            raise TimeoutError("late")
        except TimeoutError as error:
            raise RuntimeError("it did not work") from error
    except RuntimeError as error:
        return error


def measure(plan: Plan, progress: Progress) -> Iterator[Row]:
    rounds = plan.rounds(60, 10)
    one, stream, failing = _app(1), _app(PARTS), _app(1, fails=True)
    arms: tuple[tuple[str, Callable[[Any, int], float], Any, Any, float | None], ...] = (
        ("an ASGI request: added", _asgi, one, ErrorMiddleware(one), BUDGET_US),
        (f"an ASGI stream of {PARTS} parts: added", _asgi, stream, ErrorMiddleware(stream), None),
        ("an ASGI request that raises: added", _asgi, failing, ErrorMiddleware(failing), None),
        ("a WSGI request: added", _wsgi, _wsgi_app, WsgiMiddleware(_wsgi_app), BUDGET_US))
    added: dict[str, list[float]] = {name: [] for name, *_ in arms}
    same: dict[str, list[float]] = {name: [] for name, *_ in arms}
    classified, error = list[float](), _wrapped()
    classify(error)
    done = progress(rounds)
    for _ in range(rounds):
        for name, served, bare, guarded, _budget in arms:
            cost = served(bare, NUMBER)
            same[name].append((served(bare, NUMBER) - cost) / 1e3)
            added[name].append((served(guarded, NUMBER) - cost) / 1e3)
        began = time.thread_time_ns()
        for _ in range(50):
            classify(error)
        classified.append((time.thread_time_ns() - began) / 50)
        done()
    for name, *_, budget in arms:
        yield compared(GROUP, name, added[name], same[name], "µs", budget=budget)
    yield repeated(GROUP, "an exception with a cause is classified", classified, "µs", scale=1e-3)
