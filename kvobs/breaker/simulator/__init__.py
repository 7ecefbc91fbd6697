"""The breaker's simulator: traces through a modelled server under several policies, and past incidents replayed.

The machine is the one that acts in a process (``kvobs.breaker.step``); the server is a model.
"""

from __future__ import annotations

from kvobs.breaker.simulator._incident import UNKNOWN, WANTED, Trouble, WouldHave, hindsight, replayed
from kvobs.breaker.simulator._recorded import MAPPING
from kvobs.breaker.simulator._report import NOTES, Figures, compared, figures, transition_line, untold
from kvobs.breaker.simulator._run import Ended, Run, simulate
from kvobs.breaker.simulator._scenarios import SHAPES, scenario
from kvobs.breaker.simulator._server import CONSTANTS, Constant, Server, server_with
from kvobs.breaker.simulator._share import share_of
from kvobs.breaker.simulator._trace import MOST_REQUESTS, Request, Trace, TraceError, read_trace

__all__ = ["CONSTANTS", "MAPPING", "MOST_REQUESTS", "NOTES", "SHAPES", "UNKNOWN", "WANTED", "Constant", "Ended",
           "Figures", "Request", "Run", "Server", "Trace", "TraceError", "Trouble", "WouldHave", "compared", "figures",
           "hindsight", "read_trace", "replayed", "scenario", "server_with", "share_of", "simulate",
           "transition_line", "untold"]
