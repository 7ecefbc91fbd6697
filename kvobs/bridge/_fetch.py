"""Fetch one metrics page: bounded in time and size, from the host that was named and from no other."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.parse
import zlib
from collections.abc import Iterator

import msgspec

MAX_BYTES = 64 * 1024**2
MAX_REDIRECTS = 3
TIMEOUT_S = 10.0
CHUNK = 65_536
# Text before OpenMetrics, in which some libraries rename counters.
ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=1,*/*;q=0.1"
_ALLOWED = "allowed is http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH]"
_REDIRECTS = (301, 302, 303, 307, 308)


class FetchError(Exception):
    """A page could not be had; ``str()`` is one whole sentence that names no moment, so that it can be a reason.

    ``status`` is what the server answered instead of 200, where that is the reason.
    """

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


class Target(msgspec.Struct, frozen=True):
    """A page to scrape. ``name`` is what metrics call it: host and port, and the path where it is not /metrics."""

    scheme: str
    host: str
    port: int
    path: str
    name: str


def target_of(url: str) -> Target:
    """The target of a URL; /metrics where it has no path.

    Raises:
        ValueError: one whole sentence that says what is wrong and what is allowed.
    """
    shown = ascii(url)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the look-up of the name will, where it would be no OSError
    except ValueError:
        raise ValueError(f"The address {shown} is malformed; {_ALLOWED}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"The address {shown} is not one that can be scraped; {_ALLOWED}.")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"The address of {parts.hostname} holds credentials, which are not supported; {_ALLOWED}.")
    if parts.fragment or not url.isascii() or not url.isprintable() or " " in url or port == 0:
        raise ValueError(f"The address {shown} is malformed; {_ALLOWED}.")
    port = port or (443 if parts.scheme == "https" else 80)
    path = parts.path if parts.path not in ("", "/") else "/metrics"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    name = f"{host}:{port}" + (path if path != "/metrics" else "")
    return Target(parts.scheme, parts.hostname, port, path + (f"?{parts.query}" if parts.query else ""), name)


class Fetcher:
    """Fetches the page of one target; ``abort`` (from another thread) ends a fetch that is under way."""

    def __init__(self, target: Target, timeout_s: float = TIMEOUT_S, *, accept: str = ACCEPT) -> None:
        self.target = target
        self.accept = accept
        self.timeout_s = timeout_s
        self.openmetrics = False
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None  # the connection forgets it once the body begins
        self._late = False

    def fetch(self) -> Iterator[bytes]:
        """The page's bytes, unpacked, as they arrive; ``openmetrics`` is known once the first are there.

        Raises:
            FetchError: it cannot be had, is too large or too slow, or ended before its end.
        """
        self._late = False
        # The socket's own time limit begins anew with every byte, be it of a header or of the body.
        limit = threading.Timer(self.timeout_s, self._end_late)
        limit.daemon = True
        limit.start()
        try:
            yield from self._pages(self.target.path, MAX_REDIRECTS)
            if self._late:
                raise TimeoutError
        except Exception as error:  # on an answer that is cut short, http.client may raise anything
            raise self._told(error) from None
        finally:
            limit.cancel()
            self.abort()

    def abort(self) -> None:
        """Close the connection: whoever reads from it stops."""
        (connection, self._connection), (ours, self._socket) = (self._connection, None), (self._socket, None)
        if ours is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(ours, socket.SHUT_RDWR)  # not TLS' own, which a reader would not survive
        if connection is not None:
            connection.close()

    def _end_late(self) -> None:
        self._late = True
        self.abort()

    def _told(self, error: Exception) -> FetchError:
        name = self.target.name
        if self._late or isinstance(error, TimeoutError):
            return FetchError(f"{name} did not answer in full within {self.timeout_s:g} s.")
        if isinstance(error, FetchError):
            return error
        if isinstance(error, zlib.error):
            return FetchError(f"The answer of {name} is not what its gzip header says.")
        if isinstance(error, OSError) and not isinstance(error, http.client.HTTPException):
            return FetchError(f"{name} cannot be reached ({(error.strerror or type(error).__name__).lower()}).")
        return FetchError(f"The answer of {name} is not HTTP ({type(error).__name__}).")

    def _pages(self, path: str, redirects: int) -> Iterator[bytes]:
        response = self._ask(path)
        if response.status in _REDIRECTS:
            following = self._following(path, response)
            self.abort()
            if not redirects:
                raise FetchError(f"{self.target.name} redirects more than {MAX_REDIRECTS} times.")
            yield from self._pages(following, redirects - 1)
            return
        if response.status != http.client.OK:
            raise FetchError(f"{self.target.name} answered {response.status}, not 200.", response.status)
        self.openmetrics = (response.headers.get_content_type() == "application/openmetrics-text")
        encoding = (response.getheader("Content-Encoding") or "identity").strip().lower()
        if encoding == "gzip":
            yield from self._unpacked(response)
        elif encoding == "identity":
            yield from self._bounded(self._received(response))
        else:
            raise FetchError(f"The answer of {self.target.name} has the encoding {encoding[:20]!r}, not gzip or none.")

    def _ask(self, path: str) -> http.client.HTTPResponse:
        kind = http.client.HTTPSConnection if self.target.scheme == "https" else http.client.HTTPConnection
        connection = self._connection = kind(self.target.host, self.target.port, timeout=self.timeout_s)
        connection.connect()
        self._socket = connection.sock
        if self._late:
            raise TimeoutError
        connection.request("GET", path, headers={"Accept": self.accept, "Accept-Encoding": "gzip",
                                                 "Connection": "close", "User-Agent": "kvobs-bridge"})
        return connection.getresponse()

    def _following(self, path: str, response: http.client.HTTPResponse) -> str:
        here = f"{self.target.scheme}://{self.target.name.partition('/')[0]}"
        try:
            to = target_of(urllib.parse.urljoin(here + path, response.getheader("Location") or ""))
        except ValueError:
            raise FetchError(f"{self.target.name} redirects to an address that cannot be scraped.") from None
        if (to.scheme, to.host, to.port) != (self.target.scheme, self.target.host, self.target.port):
            raise FetchError(f"{self.target.name} redirects to another host ({to.host}:{to.port}), which is refused.")
        return to.path

    def _received(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The body as it was sent; it ends where its length says."""
        expected, got = response.length, 0
        while chunk := response.read1(CHUNK):
            got += len(chunk)
            yield chunk
        if expected is not None and got < expected:
            raise FetchError(f"The answer of {self.target.name} ended early.")

    def _bounded(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if size > MAX_BYTES:
                raise FetchError(f"The answer of {self.target.name} is larger than {MAX_BYTES // 1024**2} MiB.")
            yield chunk

    def _unpacked(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        unpack = zlib.decompressobj(wbits=31)

        def parts() -> Iterator[bytes]:
            for chunk in self._received(response):
                yield unpack.decompress(chunk, CHUNK)
                while unpack.unconsumed_tail:
                    yield unpack.decompress(unpack.unconsumed_tail, CHUNK)
            if not unpack.eof:
                raise FetchError(f"The answer of {self.target.name} ended early.")

        return self._bounded(parts())
