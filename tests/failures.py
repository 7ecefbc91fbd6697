"""Failures that happen for real, and the class that each belongs to, written by hand."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Missing(Exception):
    """The library of a case is not installed."""


class Case(NamedTuple):
    """``fail`` raises; ``needs`` is what must be installed besides the standard library and kvobs's dependencies."""

    name: str
    expected: str
    fail: Callable[[Path], object]
    needs: str


CASES: list[Case] = []


def case(expected: str, needs: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that fails; it is given the module that it needs, or a directory."""
    def register(fail: Callable[..., Any]) -> Callable[..., Any]:
        def run(directory: Path) -> object:
            if not needs:
                return fail(directory)
            try:
                module = importlib.import_module(needs)
            except ImportError:
                raise Missing(f"{needs} is not installed.") from None
            return fail(module)

        CASES.append(Case(fail.__name__, expected, run, needs))
        return fail

    return register


@contextlib.contextmanager
def answering(data: bytes, hold: bool = False) -> Iterator[int]:
    """A server on a free port that sends these bytes once and closes, or keeps silent until the client leaves."""
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))
    clients: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            clients.append(client)
            with client, contextlib.suppress(OSError):
                client.recv(65_536)
                client.sendall(data)
                if hold:
                    while client.recv(65_536):
                        pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        thread.join(10)


def closed_port() -> int:
    """A port of this machine on which nobody listens."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


importlib.import_module("tests.failures_standard")
importlib.import_module("tests.failures_libraries")
