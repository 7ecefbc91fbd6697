"""The signals that conditions may name, and what they mean. Applications report others as ``app.NAME``."""

from __future__ import annotations

import re

import msgspec

# Those of kvobs.allocator.verdict, which is not imported in every process.
VERDICTS = ("SERVED", "GROW", "RECLAIM", "WAIT", "WRONG_POOL", "FRAGMENTED", "CAPACITY")
SERVED = VERDICTS[0]
APPLICATION = re.compile(r"app\.[a-z][a-z0-9_]{0,62}")


class Signal(msgspec.Struct, frozen=True):
    """A signal: what it says, its unit, and the words that it may be, where it is not a number."""

    name: str
    unit: str
    meaning: str
    words: tuple[str, ...] = ()


_TABLE = (
    Signal("verdict", "", "what would become of the next step of the live caches on this device (estimated demand); "
           "GROW where the device has room for all of it, whether or not free blocks would serve", VERDICTS),
    Signal("pool_verdict", "", "what would become of the next waiting request in the engine's KV pool", VERDICTS),
    Signal("headroom", "1", "share of the bytes that this process may have on the device which is not allocated"),
    Signal("fragmentation_article", "1", "the article's fragmentation rate (S5); no measure of waste, see the README"),
    Signal("kv_utilization", "1", "share of the engine's KV blocks that live requests hold"),
    Signal("waiting", "{request}", "requests that wait in the engine"),
    Signal("preemption_rate", "1/s", "preemptions per second over the last 10 s"),
    Signal("failure_rate", "1/s", "allocations that the KV pool refused, per second over the last 10 s"),
    Signal("out_of_memory", "{error}", "out-of-memory errors in the last 60 s"),
    Signal("burn_rate", "1", "the highest burn rate of any objective, the lower one of its 5 minutes and 1 hour"),
    Signal("cpu", "1", "share of the process's CPUs in use (S11)"),
    Signal("hit_rate", "1", "share of prompt tokens found in the prefix cache over the last 60 s (S11)"),
    Signal("gateway_p99", "s", "P99 of the gateway's latency, as the gateway reports it (S11)"),
    Signal("pool_use", "1", "share of a connection pool in use, as the application reports it (S11)"),
)
SIGNALS: dict[str, Signal] = {signal.name: signal for signal in _TABLE}


def signal_named(name: str) -> Signal:
    """The signal of a name.

    Raises:
        ValueError: there is none; one clause that says what is allowed.
    """
    if name in SIGNALS:
        return SIGNALS[name]
    if APPLICATION.fullmatch(name):
        return Signal(name, "", "reported by the application")
    raise ValueError(f"there is no signal {name!r}; allowed are {', '.join(SIGNALS)} and app.NAME for an "
                     "application's own")
