"""An operator's word to the breaker over HTTP, beside the metrics: ``GET /breaker``, ``POST /breaker/hold`` and
``POST /breaker/reset``.

Nothing is believed because it comes from this machine: a web page that somebody has open can send requests to loopback
(its own name may resolve there), and so can every local user. So the Host must be one by which this server is reached,
an Origin must be this server's own, and a command needs the token, in a form that no HTML form can send.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable
from email.message import Message
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

STATUS, HOLD, RESET = "/breaker", "/breaker/hold", "/breaker/reset"
METHODS = {STATUS: "GET, HEAD", HOLD: "POST", RESET: "POST"}
MOST_BYTES = 4_096  # of a command
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@\[\]]+)(:\d{1,5})?")
_COMMON = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))


class Control(Protocol):
    """What a breaker lets an operator do. Any thread may call."""

    token: str  # empty where nothing may be commanded

    def status(self) -> dict[str, Any]:
        """How everything stands, as JSON has it; no secrets."""
        ...

    def hold(self, level: int | None) -> bool:
        """Hold a level, or let the machine have its way again (None); False where too many commands wait.

        Raises:
            ValueError: there is no such level; a whole sentence.
        """
        ...

    def reset(self) -> bool:
        """Close all levels; False where too many commands wait."""
        ...


class Request(NamedTuple):
    """A request as far as it was read. ``host`` is the configured one, ``local`` the address that the client reached;
    ``read`` reads so many bytes of the body.
    """

    method: str
    path: str
    headers: Message
    host: str
    local: str
    read: Callable[[int], bytes]


class Answer(NamedTuple):
    """What is answered: JSON and headers."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = _COMMON


class _Refused(Exception):
    """``str()`` is one sentence."""

    def __init__(self, status: int, sentence: str, *headers: tuple[str, str]) -> None:
        super().__init__(sentence)
        self.status, self.headers = status, headers


_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class _Hold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: int | None


class _Reset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


def concerns(path: str) -> bool:
    """Whether a path is one of these."""
    return path == STATUS or path.startswith(STATUS + "/")


def answer(control: Control | None, request: Request) -> Answer:
    """The answer to a request. Raises OSError where the body cannot be read."""
    try:
        _check_sender(request)
        if control is None:
            raise _Refused(404, "This process has no breaker; KVOBS_BREAKER=observe (or act) gives it one.")
        if request.path not in METHODS:
            raise _Refused(404, f"Served here are {', '.join(METHODS)}.")
        if request.method not in METHODS[request.path].split(", "):
            allowed = METHODS[request.path]
            raise _Refused(405, f"{request.path} takes {allowed.replace(', ', ' and ')} only.", ("Allow", allowed))
        if request.path == STATUS:
            return Answer(200, msgspec.json.encode(control.status()))
        return _command(control, request)
    except _Refused as refused:
        return Answer(refused.status, msgspec.json.encode({"error": str(refused)}), (*_COMMON, *refused.headers))


def _command(control: Control, request: Request) -> Answer:
    _check_token(control.token, request.headers)
    body = _body(request)
    try:
        if request.path == HOLD:
            level = _decoded(body, _Hold, '{"level": 0 to 3} or {"level": null}').level
            taken, said = control.hold(level), {"hold": level}
        else:
            _decoded(body or b"{}", _Reset, "{} or nothing")
            taken, said = control.reset(), {"reset": None}
    except ValueError as error:
        raise _Refused(400, str(error)) from None
    if not taken:
        raise _Refused(503, "The breaker has not yet taken up the last commands.", ("Retry-After", "1"))
    return Answer(202, msgspec.json.encode({"taken": said, "message": "It takes effect within about a second."}))


# -- who asks --------------------------------------------------------------------------------------------


def _check_sender(request: Request) -> None:
    """Refuse what a web page of another origin could send."""
    hosts = request.headers.get_all("Host", [])
    if len(hosts) != 1 or not allowed_host(hosts[0], request.host, request.local):
        raise _Refused(403, "The Host header must name loopback, the configured host or the address that was reached.")
    own = "http://" + hosts[0].strip().lower()
    if any(origin.strip().lower() != own for origin in request.headers.get_all("Origin", [])):
        raise _Refused(403, "Requests of other origins than this server's own are refused.")


def allowed_host(header: str, configured: str, local: str) -> bool:
    """Whether a Host header names loopback, the configured host, or the very address that the client reached."""
    found = _HOST.fullmatch(header.strip())
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    address = _address(name)
    if address is None:
        return name in ("localhost", configured.lower())
    return address.is_loopback or (not address.is_unspecified and address in (_address(configured), _address(local)))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _check_token(token: str, headers: Message) -> None:
    if not token:
        raise _Refused(403, "This process takes no commands over HTTP, as it has neither a token file beside a store "
                            "nor KVOBS_CONTROL_TOKEN.")
    given = headers.get_all("Authorization", [])
    kind, _, word = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    same = hmac.compare_digest(word.strip().encode("utf-8", "surrogateescape"), token.encode())
    if kind.lower() != "bearer" or not same:
        raise _Refused(401, "A command needs the header Authorization: Bearer TOKEN with this process's token.",
                       ("WWW-Authenticate", "Bearer"))


# -- what is asked ---------------------------------------------------------------------------------------


def _body(request: Request) -> bytes:
    headers = request.headers
    if headers.get_content_type() != "application/json" or "Content-Type" not in headers:
        raise _Refused(415, "The body must be JSON, with the header Content-Type: application/json.")
    lengths = headers.get_all("Content-Length", [])
    if len(lengths) != 1 or "Transfer-Encoding" in headers or not re.fullmatch("[0-9]{1,18}", lengths[0].strip()):
        raise _Refused(411, "A command needs one Content-Length.")
    length = int(lengths[0])
    if length > MOST_BYTES:
        raise _Refused(413, f"The body of a command has {MOST_BYTES} bytes at most.")
    body = request.read(length)
    if len(body) != length:
        raise _Refused(400, "The body is shorter than its Content-Length.")
    return body


def _decoded(body: bytes, kind: type[_Kind], allowed: str) -> _Kind:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"The body must be {allowed}.") from None
