"""What a thread is doing: inside a forward pass, within which generate call, and whether it is sampled."""

from __future__ import annotations

import threading

from kvobs.sources.transformers._sample import PassSample
from kvobs.sources.transformers._turns import LiveTurn


class Local(threading.local):
    """State per thread."""

    busy = False
    turn: LiveTurn | None = None
    sample: PassSample | None = None
