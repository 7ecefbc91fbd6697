"""A small web server of the test's own, whose one answer the test decides: text, headers, how it is sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Page:
    """What the server answers now; ``asked`` are the paths and headers of the requests so far."""

    def __init__(self, answer: Answer, port: int) -> None:
        self.answer = answer
        self.url = f"http://127.0.0.1:{port}"
        self.name = f"127.0.0.1:{port}"
        self.asked: list[tuple[str, dict[str, str]]] = []


def text(body: bytes | str, status: int = 200, **headers: str) -> Answer:
    """A whole, well-formed answer; names of headers are written with underscores."""
    sent = body.encode() if isinstance(body, str) else body

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in ({"Content_Type": "text/plain", "Content_Length": str(len(sent))} | headers).items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        with contextlib.suppress(OSError):
            request.wfile.write(sent)

    return answer


@contextlib.contextmanager
def served(answer: Answer) -> Iterator[Page]:
    """Serve ``answer`` on a free port of this machine's loopback."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page.asked.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
            page.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        page = Page(answer, server.server_address[1])
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield page
        finally:
            server.shutdown()
            thread.join()
