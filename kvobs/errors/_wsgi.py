"""Middleware for any WSGI server that counts how requests end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from opentelemetry import trace

from kvobs.errors._end import ended
from kvobs.errors._tally import tally

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

SERVER = "wsgi"
BODILESS = (204, 304)


class ErrorMiddleware:
    """Counts the requests of an application and tells its failures apart; exceptions pass it unchanged.

    An answer that is a list, a tuple or what the server's ``wsgi.file_wrapper`` made is handed on as it is and counted
    at once. Where that wrapper is no type (uWSGI's), a function that calls it stands in its place while the application
    is called. Of any other iterable each part is handed on as it comes; where the server closes it before its end, the
    client has left, and the request is ``cancelled``.

    Args:
        app: the application.
    """

    def __init__(self, app: WSGIApplication) -> None:
        self.app = app
        tally.begin(SERVER)

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """One request."""
        request = _Request(trace.get_current_span(), start_response, environ.get("REQUEST_METHOD") == "HEAD")
        files = _Files(environ)
        try:
            result = self.app(environ, request.start_response)
        except BaseException as error:
            request.end(error)
            raise
        finally:
            files.put_back(environ)
        if isinstance(result, list | tuple) or files.has_made(result):
            request.end(None, whole=True)
            return result
        return _SizedParts(result, request) if hasattr(result, "__len__") else _Parts(result, request)


class _Files:
    """What the server's ``wsgi.file_wrapper`` makes: known by its type, or where it is no type by being asked for."""

    __slots__ = ("_made", "_wrapper")

    def __init__(self, environ: WSGIEnvironment) -> None:
        self._wrapper = environ.get("wsgi.file_wrapper")
        self._made: list[object] = []
        if self._is_function():
            environ["wsgi.file_wrapper"] = self._wrap

    def _is_function(self) -> bool:
        return callable(self._wrapper) and not isinstance(self._wrapper, type)

    def _wrap(self, *arguments: Any, **named: Any) -> Any:
        made = self._wrapper(*arguments, **named)  # type: ignore[misc]
        self._made.append(made)
        return made

    def put_back(self, environ: WSGIEnvironment) -> None:
        """For the server, which may look at it or use the environ again."""
        if self._is_function():
            environ["wsgi.file_wrapper"] = self._wrapper

    def has_made(self, result: object) -> bool:
        if isinstance(self._wrapper, type):
            return isinstance(result, self._wrapper)
        return any(result is one for one in self._made)


class _Request:
    """What is known of a request; it is counted once."""

    __slots__ = ("_length", "_over", "_sent", "_span", "_start", "_told", "began", "error", "gone", "status")

    def __init__(self, span: trace.Span, start_response: StartResponse, bodiless: bool) -> None:
        self._span, self._start = span, start_response
        self._length: int | None = 0 if bodiless else None
        self._sent = 0
        self._over = False
        self.status: int | None = None
        self.began = self.gone = False
        self.error: BaseException | None = None

    def start_response(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None,
                       /) -> Callable[[bytes], object]:
        if exc_info is not None:  # the application answers an exception of its own
            self.error = exc_info[1]
        write = self._start(status, headers, exc_info) if exc_info is not None else self._start(status, headers)
        self._note(status, headers)

        def written(data: bytes, /) -> object:
            try:
                found = write(data)
            except OSError:
                self.gone = True
                raise
            self.took(data)
            return found

        return written

    def _note(self, status: str, headers: list[tuple[str, str]]) -> None:
        try:
            self.status = int(status[:3])
            if self._length is None:
                declared = next((value for name, value in headers if name.lower() == "content-length"), None)
                self._length = 0 if self.status in BODILESS else None if declared is None else int(declared)
        except (ValueError, TypeError, AttributeError):  # the server says what it thinks of that
            pass

    def took(self, part: bytes) -> None:
        if part:
            self.began = True
            self._sent += len(part)

    def end(self, error: BaseException | None, *, whole: bool = False, closed: bool = False) -> None:
        """It is over: it raised, came to its end, or was ``closed`` before."""
        if self._over:
            return
        self._over = True
        if closed and error is None:
            whole = self._length is not None and self._sent >= self._length  # the server needs no more than that
            self.gone = self.gone or not (whole or self.error)
        answered = whole and error is None and self.error is not None  # of which nothing had gone out then
        ended(SERVER, self._span, error or self.error, self.status, gone=self.gone, whole=whole,
              began=self.began and not answered)
        self.error = None


class _Parts:
    """The parts of an answer, counted when the last is gone."""

    def __init__(self, result: Iterable[bytes], request: _Request) -> None:
        self._result, self._request = result, request
        self._parts: Iterator[bytes] | None = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        request = self._request
        try:
            if self._parts is None:
                self._parts = iter(self._result)
            part = next(self._parts)
        except StopIteration:
            request.end(None, whole=True)
            raise
        except BaseException as error:
            request.end(error)
            raise
        request.took(part)
        return part

    def close(self) -> None:
        """The server is done with it, at its end or before."""
        try:
            close = getattr(self._result, "close", None)
            if close is not None:
                close()
        except BaseException as error:
            self._request.end(error, closed=True)
            raise
        self._request.end(None, closed=True)


class _SizedParts(_Parts):
    """Servers take the length of an answer of one part from that part."""

    def __len__(self) -> int:
        return len(self._result)  # type: ignore[arg-type]
