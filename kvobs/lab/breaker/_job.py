"""Runs under one setting of the allocator, in a process of their own: reads a job as JSON on stdin, writes one line of
JSON per run.

The clock is modelled: ``time.monotonic_ns`` stands still but for the steps of the server, and is replaced before kvobs
is imported, so that all of kvobs, unchanged, lives on it. Its drain thread is not started: each step ticks once.
"""

from __future__ import annotations

import json
import sys
import time

CLOCK = [1_000_000_000_000]  # ns
NEVER_S = 3_600.0


def main() -> int:
    """Do the job."""
    time.monotonic_ns = lambda: CLOCK[0]
    from kvobs.lab.breaker._runs import run
    from kvobs.sources import _safe_point

    # Orders are carried out between steps. A thread that looks after them by the host's clock would be slow here.
    _safe_point.PATIENCE_S = NEVER_S
    for told in run(json.loads(sys.stdin.read()), CLOCK):
        sys.stdout.write(told + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
