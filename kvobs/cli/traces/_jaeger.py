"""A trace from Jaeger's query service: API v3, and the older one where that does not answer with a trace."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvobs.bridge import TIMEOUT_S, Fetcher, FetchError, target_of
from kvobs.cli.traces import _legacy, _otlp
from kvobs.cli.traces._model import Span, Trace, TraceError

Reader = Callable[[bytes], list[tuple[str, Span]]]
# Raw: as it was stored, without Jaeger's own guess at the skew of clocks.
ROUTES: tuple[tuple[str, str, Reader], ...] = (
    ("/api/v3/traces/{}?rawTraces=true", "API v3", _otlp.read),
    ("/api/traces/{}?raw=true", "its older API", _legacy.read))
NOT_FOUND = 404


class Found(msgspec.Struct, frozen=True):
    """What one route gave: spans, or why not. ``final``: the other route need not be asked; ``missing``: a 404."""

    spans: tuple[Span, ...] = ()
    why: str = ""
    final: bool = False
    missing: bool = False


def fetch(address: str, trace_id: str, timeout_s: float = TIMEOUT_S) -> Trace:
    """The trace of an id (lower-case hex) from the Jaeger at a web address.

    Each of the two requests may take ``timeout_s`` seconds and 64 MiB.

    Raises:
        TraceError: there is none, or Jaeger cannot be reached or answers with something else.
    """
    answers = []
    for path, name, read in ROUTES:
        answer = _ask(address, path.format(trace_id), trace_id, timeout_s, read)
        if answer.spans:
            notes = () if read is _otlp.read else ("Times of the older API are whole microseconds.",)
            return Trace(trace_id=trace_id, source=f"Jaeger at {address} ({name})", spans=answer.spans, notes=notes)
        answers.append(answer)
        if answer.final:
            break
    if all(answer.missing for answer in answers):
        raise TraceError(f"The Jaeger at {address} has no trace {trace_id}.")
    raise TraceError(next(answer.why for answer in answers if not answer.missing))


def _ask(address: str, path: str, trace_id: str, timeout_s: float, read: Reader) -> Found:
    try:
        target = target_of(address + path)
        document = b"".join(Fetcher(target, timeout_s, accept="application/json").fetch())
    except ValueError as error:
        return Found(why=str(error), final=True)
    except FetchError as error:
        return Found(why=str(error), final=error.status is None, missing=error.status == NOT_FOUND)
    try:
        found = read(document)
    except TraceError as error:
        return Found(why=f"What {address} answers is no answer of Jaeger: {error}.")
    spans = tuple(span for one, span in found if one.zfill(32) == trace_id.zfill(32))
    if found and not spans:
        return Found(why=f"What {address} answers is another trace than {trace_id}.")
    return Found(spans=spans, final=True, missing=not spans)
