"""What a thread is doing: inside a forward pass, within which generate call, and whether it is sampled.

``astray`` is set within a generate call that began while observation paused: its passes belong to no turn.
"""

from __future__ import annotations

import threading

from kvobs.sources.transformers._sample import PassSample
from kvobs.sources.transformers._turns import LiveTurn


class Local(threading.local):
    """State per thread."""

    busy = astray = False
    turn: LiveTurn | None = None
    sample: PassSample | None = None
