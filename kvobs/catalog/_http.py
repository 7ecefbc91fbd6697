"""Requests at kvobs's middleware: how they ended."""

from __future__ import annotations

from kvobs.catalog._row import Row, counter

ROWS: tuple[Row, ...] = (
    counter("kvobs.http.requests", "{request}", ("server", "outcome"),
            "Requests at the middleware for errors that ended (server asgi or wsgi): ok, refused (answered 4xx), "
            "failed (5xx, no whole answer, or an exception) or cancelled (the client left before the end).", "count"),
    counter("kvobs.http.failures", "{request}", ("server", "error.type", "phase"),
            "Of these, the ones that are not ok, by class; phase stream is an answer that had begun when it broke off "
            "or an exception came, start any other, whole answers of 4xx and 5xx too.", "count"),
)
