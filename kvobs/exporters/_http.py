"""A small HTTP server for scrapes: GET and HEAD of two paths, bounded in time, threads and connections; and for an
operator's word to the breaker.
"""

from __future__ import annotations

import contextlib
import gzip
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler
from typing import Any

from kvobs.exporters import _control
from kvobs.exporters._control import Control

_log = logging.getLogger("kvobs")
MAX_CONNECTIONS = 16
CLIENT_TIMEOUT_S = 5.0
MOST_DISCARDED = 65_536  # bytes of a body that was refused: a client that still sends would not read the answer
# From the Accept and Accept-Encoding headers to content type, body and whether the body may be compressed.
Render = Callable[[str, str], tuple[str, bytes, bool]]


class ScrapeServer(socketserver.TCPServer):
    """Serves on daemon threads. A connection beyond the bound replaces the oldest one, so that stuck clients
    neither pile up nor lock out the next scrape.
    """

    allow_reuse_address = True
    allow_reuse_port = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, render: Render, control: Control | None = None) -> None:
        """Raises OSError when the address cannot be bound."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.render, self.control, self.host = render, control, host
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="kvobs-http", daemon=True)
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            self._closing.wait(0.1)  # out of descriptors: the caller would retry at once, forever
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(target=self._serve, args=(request, client_address), name="kvobs-http-client",
                                  daemon=True)
        with self._lock:
            while len(self._open) >= MAX_CONNECTIONS:
                _hang_up(next(iter(self._open)))
                del self._open[next(iter(self._open))]
            self._open[request] = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads: the caller closes the connection
            with self._lock:
                self._open.pop(request, None)
            raise

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("kvobs: a connection was refused.", exc_info=True)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception as error:
            _log.debug("kvobs: a scrape ended early: %r.", error)
        finally:
            with self._lock:
                self._open.pop(request, None)
            self.shutdown_request(request)

    def stop(self) -> None:
        """Stop listening and hang up on everybody; waits at most about a second."""
        self._closing.set()
        self.shutdown()
        self.server_close()
        self._thread.join(1)
        with self._lock:
            left = list(self._open.items())
        for connection, _ in left:
            _hang_up(connection)
        for _, thread in left:
            thread.join(1)

    def abandon(self) -> None:
        """In a forked child: close its copies of the descriptors; the parent's connections stay up.

        Takes no lock: it may be held by a thread that does not exist here.
        """
        self.socket.close()
        for connection in list(self._open):
            connection.close()


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client may have been first
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: ScrapeServer
    server_version = "kvobs"
    sys_version = ""
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _refuse(self) -> None:
        if _control.concerns(self._path):
            return self._command()
        self._send(405, "text/plain; charset=utf-8", b"Only GET and HEAD are served.\n",
                   headers=[("Allow", "GET, HEAD")])
        return None

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse

    @property
    def _path(self) -> str:
        return self.path.partition("?")[0]

    def _command(self) -> None:
        request = _control.Request(self.command, self._path, self.headers, self.server.host,
                                   str(self.connection.getsockname()[0]), self.rfile.read)
        try:
            answer = _control.answer(self.server.control, request)
        except OSError:
            raise
        except Exception as error:
            _log.warning("kvobs: a request to the breaker failed: %s: %s.", type(error).__name__, error)
            answer = _control.Answer(500, b'{"error":"The request could not be answered."}')
        self._send(answer.status, "application/json", answer.body, headers=answer.headers)
        if answer.status >= 400 and self.command != "HEAD":
            self._discard()

    def _discard(self) -> None:
        """Read what a client is still sending, so that it is not cut off before it reads the answer."""
        self.connection.shutdown(socket.SHUT_WR)
        left = MOST_DISCARDED
        while left > 0 and (data := self.rfile.read1(left)):
            left -= len(data)

    def _answer(self) -> None:
        path = self._path
        if _control.concerns(path):
            self._command()
        elif path == "/healthz":
            self._send(200, "text/plain; charset=utf-8", b"ok\n")
        elif path != "/metrics":
            self._send(404, "text/plain; charset=utf-8", b"Served here are /metrics and /healthz.\n")
        else:
            try:
                kind, body, zipped = self.server.render(self.headers.get("Accept", ""),
                                                        self.headers.get("Accept-Encoding", ""))
            except Exception:
                _log.warning("kvobs: a scrape could not be rendered.", exc_info=_log.isEnabledFor(logging.DEBUG))
                self._send(500, "text/plain; charset=utf-8", b"The metrics could not be rendered.\n")
                return
            self._send(200, kind, body, zipped=zipped)

    def _send(self, status: int, kind: str, body: bytes, *, zipped: bool = False,
              headers: Iterable[tuple[str, str]] = ()) -> None:
        if zipped:
            body = gzip.compress(body, compresslevel=1)
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Vary", "Accept, Accept-Encoding")
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug("kvobs: scrape: " + format, *args)
