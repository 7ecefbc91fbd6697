"""The WSGI middleware for errors, under a server of the standard library's kind."""

from __future__ import annotations

import io
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.handlers import SimpleHandler
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.util import FileWrapper, setup_testing_defaults
from wsgiref.validate import validator

import pytest

from kvobs.errors import tally
from kvobs.wsgi import ErrorMiddleware
from tests.support import wait_until


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    tally.__init__()  # type: ignore[misc]
    yield
    tally.__init__()  # type: ignore[misc]


LOST = TimeoutError("late")


def counts() -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    return ({outcome: number for (_, outcome), number in tally.requests().items() if number},
            {(found, phase): number for (_, found, phase), number in tally.failures().items()})


def served(app: Any, method: str = "GET") -> bytes:
    """What the standard library's handler writes for one request."""
    environ: dict[str, Any] = {"REQUEST_METHOD": method}
    setup_testing_defaults(environ)
    out = io.BytesIO()
    handler = SimpleHandler(io.BytesIO(), out, io.StringIO(), environ, multithread=False)
    handler.http_version, handler.server_software = "1.1", None  # type: ignore[assignment]
    handler.origin_server = False
    handler.run(app)
    return out.getvalue()


def parts(*found: bytes, status: str = "200 OK", error: BaseException | None = None,
          headers: Any = ()) -> Callable[..., Any]:
    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response(status, [("Content-Type", "text/plain"), *headers])
        yield from found
        if error is not None:
            raise error

    return app


def listed(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"one"]


def raising(environ: Any, start_response: Any) -> list[bytes]:
    raise LOST


def answering_its_error(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    try:
        raise LOST
    except TimeoutError:
        start_response("500 No", [("Content-Type", "text/plain")], sys.exc_info())
    return [b"sorry"]


def answering_its_error_in_parts(environ: Any, start_response: Any) -> Iterator[bytes]:
    answering_its_error(environ, start_response)
    yield b"sorry"


def writing(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])(b"one")
    return []


def a_file(environ: Any, start_response: Any) -> Any:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return environ["wsgi.file_wrapper"](io.BytesIO(b"file"))


class Sized:
    """An answer of one part, whose length servers ask for."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[bytes]:
        return iter([b"one"])


def sized(environ: Any, start_response: Any) -> Sized:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return Sized()


CASES = {
    "a list": (listed, "ok", None), "parts": (parts(b"one", b"two"), "ok", None), "a file": (a_file, "ok", None),
    "a sized answer": (sized, "ok", None), "a writer": (writing, "ok", None),
    "not there": (parts(b"no", status="404 No"), "refused", ("refused", "start")),
    "a gateway's timeout": (parts(b"no", status="504 No"), "failed", ("network_timeout", "start")),
    "an exception": (raising, "failed", ("network_timeout", "start")),
    "one before the first part": (parts(error=LOST), "failed", ("network_timeout", "start")),
    "one within the answer": (parts(b"one", error=LOST), "failed", ("network_timeout", "stream")),
    "one that is answered": (answering_its_error, "failed", ("network_timeout", "start")),
    "one that is answered in parts": (answering_its_error_in_parts, "failed", ("network_timeout", "start")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_request_has_one_outcome_and_the_same_answer(name: str) -> None:
    """Each way to end is one outcome, and the server writes the same bytes as without the middleware."""
    app, outcome, failure = CASES[name]
    without = served(app)
    assert served(ErrorMiddleware(app)) == without
    assert counts() == ({outcome: 1}, {} if failure is None else {failure: 1})


@pytest.mark.parametrize("app", [listed, parts(b"one", b"two"), parts()])
def test_the_interface_is_kept(app: Any) -> None:
    """The standard library's validator finds nothing to say, on either side."""
    served(validator(ErrorMiddleware(validator(app))))
    assert counts() == ({"ok": 1}, {})


def call(app: Any, method: str = "GET") -> Any:
    environ: dict[str, Any] = {"REQUEST_METHOD": method}
    setup_testing_defaults(environ)
    return ErrorMiddleware(app)(environ, lambda status, headers, exc_info=None: lambda data: None)


def test_an_answer_that_is_closed_early_is_cancelled() -> None:
    """Closing before the end means that the client left; closing twice counts once; the generator is closed too."""
    ended: list[str] = []

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            yield b"one"
            yield b"two"
        finally:
            ended.append("closed")

    answer = call(app)
    assert next(answer) == b"one"
    answer.close()
    answer.close()
    assert ended == ["closed"]
    assert counts() == ({"cancelled": 1}, {("cancelled", "stream"): 1})


@pytest.mark.parametrize(("app", "method", "taken"), [
    (parts(b"one", b"", headers=[("Content-Length", "3")]), "GET", 1), (parts(b"one"), "HEAD", 0),
    (parts(status="204 No Content"), "GET", 0)])
def test_a_server_that_needs_no_more_parts_has_sent_a_whole_answer(app: Any, method: str, taken: int) -> None:
    """After the declared length, and for an answer without a body, closing is the end."""
    answer = call(app, method)
    try:
        for _ in range(max(taken, 1)):
            next(answer, None)
    finally:
        answer.close()
    assert counts() == ({"ok": 1}, {})


def test_an_exception_passes_unchanged() -> None:
    """The same object is raised, from the call, from a part and from close."""
    with pytest.raises(TimeoutError) as caught:
        call(raising)
    assert caught.value is LOST
    answer = call(parts(b"one", error=LOST))
    assert next(answer) == b"one"
    with pytest.raises(TimeoutError) as caught:
        next(answer)
    assert caught.value is LOST


def test_files_and_lists_are_handed_on_as_they_are() -> None:
    """A server may send a file by its own means, and look at a list."""
    environ: dict[str, Any] = {"wsgi.file_wrapper": FileWrapper}
    setup_testing_defaults(environ)
    assert type(ErrorMiddleware(a_file)(environ, lambda *_: lambda data: None)) is FileWrapper
    assert call(listed) == [b"one"]


def test_a_file_wrapper_that_is_a_function_is_known_by_what_it_made() -> None:
    """uWSGI's returns the file and sends what is that very object; the environ is the server's again afterwards."""
    asked: list[Any] = []

    def wrapper(file: Any, size: int = 0) -> Any:
        asked.append(file)
        return file

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Type", "text/plain")])
        made = environ["wsgi.file_wrapper"](io.BytesIO(b"file"), 4_096)
        return made if environ["PATH_INFO"] == "/" else io.BytesIO(b"another")

    for path, same in (("/", True), ("/another", False)):
        environ: dict[str, Any] = {"wsgi.file_wrapper": wrapper, "PATH_INFO": path}
        setup_testing_defaults(environ)
        answer: Any = ErrorMiddleware(app)(environ, lambda *_: lambda data: None)
        assert (answer is asked[-1]) is same
        assert b"".join(answer) == (b"file" if same else b"another")
        assert environ["wsgi.file_wrapper"] is wrapper
    assert counts() == ({"ok": 2}, {})


class Quiet(WSGIRequestHandler):
    """A handler that logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def get_stderr(self) -> Any:
        return io.StringIO()


def test_a_client_that_leaves_a_real_server() -> None:
    """Closing the connection within a stream ends the application's generator, and the request is cancelled."""
    go_on, closed = threading.Event(), threading.Event()

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        try:
            yield b"one"
            go_on.wait(30)
            while True:
                yield b"x" * 65_536
        finally:
            closed.set()

    server = make_server("127.0.0.1", 0, ErrorMiddleware(app), handler_class=Quiet)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert client.recv(4_096)
        go_on.set()
        assert closed.wait(30)
        wait_until(lambda: counts() == ({"cancelled": 1}, {("cancelled", "stream"): 1}), what="the count")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
