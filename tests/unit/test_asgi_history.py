"""The history budget in the middleware: failures of a tokenizer, and bodies that come in pieces."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvobs.breaker._gate import OBSERVE
from kvobs.breaker._limits import UNLIMITED, Limits
from tests.asgi import App, Call, decision, guarded, scope

BUDGET = (UNLIMITED, Limits(history_tokens=5), Limits(admit=False))
TALK = {"messages": [{"role": role, "content": "word " * 9} for role in ("user", "assistant", "user")]}
BODY = json.dumps(TALK).encode()


def test_a_tokenizer_counts() -> None:
    """With one the header calls nothing an estimate: 9 words and 4 tokens for each of two messages went."""
    app = App()
    made = guarded(app, decision(limits=BUDGET), count_tokens=lambda text: len(text.split()))
    call = asyncio.run(Call(made, scope(content_length=str(len(BODY))), BODY[:30], BODY[30:]).run())
    assert json.loads(app.bodies[0]) == {"messages": TALK["messages"][2:]}
    assert dict(app.seen[0][0]["headers"])[b"content-length"] == str(len(app.bodies[0])).encode()
    assert call.headers["kvobs-history-dropped"] == "turns=1, messages=2, tokens=26"


def test_a_tokenizer_that_fails_lets_the_request_pass(caplog: pytest.LogCaptureFixture) -> None:
    """The application gets the request as it came, once; one line says why, and nothing of what was said."""
    def count(text: str) -> int:
        raise KeyError(text)

    app = App()
    made = guarded(app, decision(limits=BUDGET), count_tokens=count)
    for _ in range(2):
        call = asyncio.run(Call(made, scope(), BODY).run())
        assert call.status == 200
        assert "kvobs-history-dropped" not in call.headers
    assert app.bodies == [BODY, BODY]
    assert made.counts == {("act", "normal", "admitted"): 2}
    assert made.active == 0
    assert caplog.text.count("a history was not counted, KeyError") == 1
    assert "word" not in caplog.text


def test_in_mode_observe_it_is_only_counted() -> None:
    """The application gets the very scope, channel and messages of the server, and the would-be trimming counts."""
    app = App()
    made = guarded(app, decision(mode=OBSERVE, limits=BUDGET))
    request = scope()
    call = asyncio.run(Call(made, request, BODY[:30], BODY[30:]).run())
    assert app.seen[0][0] is request
    assert app.bodies == [BODY]
    assert "kvobs-degraded" not in call.headers
    assert made.counts == {("observe", "normal", "admitted"): 1, ("observe", "normal", "trimmed"): 1}
