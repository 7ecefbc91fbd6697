"""What a thread is doing: inside a forward pass, and within which generate call."""

from __future__ import annotations

import threading

from kvobs.sources.transformers._turns import LiveTurn


class Local(threading.local):
    """State per thread."""

    busy = False
    turn: LiveTurn | None = None
