"""The classes of failures, and which one a status of HTTP belongs to where nothing else is known."""

from __future__ import annotations

NETWORK_TIMEOUT, NETWORK_UNREACHABLE = "network_timeout", "network_unreachable"
DB_DEADLOCK, VALIDATION_FAILED = "db_deadlock", "validation_failed"
KV_CAPACITY, KV_FRAGMENTED, OUT_OF_MEMORY = "kv_capacity", "kv_fragmented", "out_of_memory"
PREEMPTED, CANCELLED = "preempted", "cancelled"
UPSTREAM, UNAVAILABLE, REFUSED, INTERNAL = "upstream", "unavailable", "refused", "internal"

MEANINGS = {
    NETWORK_TIMEOUT: "a time limit ran out while something was waited for",
    NETWORK_UNREACHABLE: "a connection could not be made: a name, a route, a port or a certificate is wrong",
    DB_DEADLOCK: "a database could not get a lock, or gave up one of two that wait for each other",
    VALIDATION_FAILED: "what was given is not what is allowed",
    KV_CAPACITY: "memory for the cache ran out, and what is free is not enough even in sum",
    KV_FRAGMENTED: "memory for the cache ran out although enough is free in sum",
    OUT_OF_MEMORY: "memory ran out, and nobody judged why",
    PREEMPTED: "the work lost its place to other work",
    CANCELLED: "the client left, or somebody stopped the work",
    UPSTREAM: "another service answered wrongly or broke off",
    UNAVAILABLE: "this service cannot take work now",
    REFUSED: "the request was not allowed, or there is no such thing",
    INTERNAL: "none of these: as a rule a mistake in a program",
}
CLASSES = tuple(MEANINGS)

BY_STATUS = {400: VALIDATION_FAILED, 408: NETWORK_TIMEOUT, 413: VALIDATION_FAILED, 415: VALIDATION_FAILED,
             422: VALIDATION_FAILED, 429: UNAVAILABLE, 499: CANCELLED, 502: UPSTREAM, 503: UNAVAILABLE,
             504: NETWORK_TIMEOUT}


def of_status(status: int) -> str:
    """The class of an answer with this status, from 400 on; a guess, where the exception is not seen."""
    return BY_STATUS.get(status, REFUSED if status < 500 else INTERNAL)
