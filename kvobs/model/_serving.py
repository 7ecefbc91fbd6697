"""What a serving engine's scheduler and its pool of KV blocks did."""

from __future__ import annotations

import msgspec

from kvobs.model._cache import Origin


class PoolWork(msgspec.Struct, frozen=True, gc=False):
    """What a block pool did since it began, told with the ``Blocks`` of the same moment. Counts grow, states do not.

    States: ``pinned`` blocks are neither free nor held by a request that is alive (vLLM's null block, blocks that wait
    for a transfer; what SGLang's sessions hold); ``tail_tokens`` fit into the last blocks of running requests beside
    what these hold (``tail_bytes`` of memory). ``unexplained`` is what the states of all blocks leave of the pool's
    size, and 0 in a sound pool.

    Counts: ``evictions`` are cached blocks that were given away for new tokens, ``dropped`` those that lost their
    content otherwise (a reset, a failed load); ``touches`` are references that cached blocks got from prefix hits.
    Prefix look-ups count at admission, in tokens, apart for requests that were preempted before (``resumed``).
    ``recomputed`` tokens were computed a second time: after a preemption, or because their block was evicted (the
    latter at least so many: the hashes of evicted blocks that are remembered are bounded). ``failures_waiting`` are
    those of the pool's ``Blocks.failures`` in which a waiting request was refused, not a running one.
    """

    t_ns: int
    origin: Origin
    cache_id: int
    pinned: int = 0
    tail_tokens: int | None = None
    tail_bytes: int | None = None
    unexplained: int = 0
    evictions: int = 0
    dropped: int = 0
    touches: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    recomputed_preempted_tokens: int = 0
    recomputed_evicted_tokens: int = 0
    failures_waiting: int = 0


class Evictions(msgspec.Struct, frozen=True, gc=False):
    """Cached blocks that a pool gave away since the last such event: how old, and how long unused.

    ``ages`` counts by the catalog's ``EVICTION_BOUNDS_NS`` how long ago the blocks were handed out, ``idles`` how long
    ago a request last held them; bucket i counts those of at most bound i, one more those above every bound.
    """

    t_ns: int
    origin: Origin
    cache_id: int
    ages: tuple[int, ...]
    ages_sum_ns: int
    idles: tuple[int, ...]
    idles_sum_ns: int


class Preemption(msgspec.Struct, frozen=True, gc=False):
    """A running request lost its blocks, at the moment when it did.

    ``cause`` is ``blocks`` (the pool had none left for ``wanted_by``, who may be the victim itself and is empty where
    the whole batch asks), ``reset`` (an operator's reset of the prefix cache) or ``forced`` (SGLang's own test of it).
    ``tokens_lost`` were computed and are not any more, unless the prefix cache still has them when the request comes
    back; ``blocks`` it gave back. ``holders`` says who held most of the pool then, as (request, blocks), the victim
    included.
    """

    t_ns: int
    origin: Origin
    cache_id: int
    request: str
    session: str
    cause: str
    wanted_by: str
    tokens_lost: int
    blocks: int
    holders: tuple[tuple[str, int], ...]


class RequestPhase(msgspec.Struct, frozen=True, gc=False):
    """A phase of a request that ended at ``t_ns``: ``queued``, ``prefill``, ``decode`` or ``preempted``.

    ``outcome`` is empty, or, in a request's last phase, how the request ended (as in ``Turn``). ``blocks`` are those
    held at the end of the phase (before they are given back).
    """

    t_ns: int
    start_ns: int
    origin: Origin
    cache_id: int
    request: str
    session: str
    phase: str
    outcome: str
    blocks: int


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """An open request as a snapshot shows it; ``state`` is ``waiting``, ``running`` or ``preempted``.

    ``reason`` says why one that waits does: ``blocks`` (the pool has too few), ``slots`` (as many requests run as may),
    ``tokens`` (the step's token budget is spent), ``turn`` (others are before it), ``step`` (it came while a step runs
    and is taken in after it), ``grammar``, ``remote_kv``, ``stream``, ``paused``, or empty where that is not
    known. ``since_ns`` is when the phase it is in began; like the arrival, and what of the prompt was cached, it is
    absent of a request that was open before it was observed.
    """

    request: str
    session: str
    priority: str
    state: str
    reason: str
    phase: str
    arrived_ns: int | None
    since_ns: int | None
    prompt_tokens: int
    new_tokens: int
    computed_tokens: int
    cached_tokens: int | None
    blocks: int
    preemptions: int


class RequestStates(msgspec.Struct, frozen=True, gc=False):
    """Who is in a serving engine now, told about once a second and when the engine falls idle.

    ``counts`` covers all requests as (state, reason, number); ``rows`` holds at most 64, those that hold most blocks
    and those that wait first, ``more`` is how many are left out. ``slots`` is how many may run at once. The last fields
    are of the request that is admitted next, absent where none waits: the blocks it needs beyond what the prefix cache
    has (``estimated`` unless the engine itself computed it), and what would become of it now: a verdict of
    ``kvobs.allocator.paged`` and its sentence.
    """

    t_ns: int
    origin: Origin
    cache_id: int
    block_bytes: int
    slots: int
    counts: tuple[tuple[str, str, int], ...]
    rows: tuple[RequestRow, ...]
    more: int
    next_request: str = ""
    next_needs: int | None = None
    next_verdict: str = ""
    next_sentence: str = ""


class ProcessRole(msgspec.Struct, frozen=True, gc=False):
    """What this process is of an engine of several: its role and its rank by kind of parallelism (``dp``, ``tp``)."""

    t_ns: int
    engine: str
    role: str
    ranks: tuple[tuple[str, int], ...]
