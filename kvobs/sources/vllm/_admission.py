"""KV-aware admission: of a scheduler's requests, as many at once as its pool can hold to their ends.

vLLM admits a request as soon as the pool has blocks for its prompt, and preempts when those that run have grown too
much. Here what they will grow to is foreseen. A request ends with its prompt and ``max_tokens``; once 20 have come to
their own end, with as many generated tokens as 95 % of the newest 256 had, if that is less. All generate one token per
step, and the first to end give their blocks back first: the pool must hold the most that this ever comes to (the peak).
The figure is an estimate: steps may bring more than a token, ends may come sooner, and blocks that requests share are
counted for each.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvobs.model import Effect
from kvobs.sources._safe_point import Result, refused
from kvobs.sources.vllm._layout import Layout
from kvobs.sources.vllm._snapshot import waiting

LIMIT = "max_num_active_reqs"
NEWEST, ENOUGH = 256, 20
LOOKS = 16  # the safe point is reached two or three times per step; so often nothing need have changed


class Lengths:
    """How many tokens requests generated that came to their own end; the newest 256."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=NEWEST)

    def add(self, tokens: int) -> None:
        """One more ended."""
        self._seen.append(tokens)

    def expected(self) -> int | None:
        """What 95 % of them did not exceed (nearest rank); None where too few were seen."""
        if len(self._seen) < ENOUGH:
            return None
        return sorted(self._seen)[-(-len(self._seen) * 19 // 20) - 1]


def to_grow(request: Any, block_size: int, longest: int, lookahead: int, expected: int | None) -> int:
    """Tokens by which a request will grow until its end; estimated.

    ``longest`` is the model's limit in tokens, ``lookahead`` the slots that drafts take beyond the last token. Of its
    last token no keys and values are computed.
    """
    outputs = int(request.max_tokens)
    if expected is not None:  # one that is beyond that already gets a block more
        generated = int(request.num_output_tokens)
        outputs = min(outputs, expected if generated < expected else generated + block_size)
    end = min(int(request.num_prompt_tokens) + outputs - 1 + lookahead, longest)
    return max(0, end - int(request.num_tokens))


class Footprint(NamedTuple):
    """What a request takes of the pool: ``per_token`` blocks for each token, and ``fixed`` ones beside these."""

    per_token: float
    fixed: float

    def peak(self, requests: Sequence[tuple[int, int]]) -> int:
        """The most blocks that requests ever hold together: (tokens by which one will grow, tokens that it has).

        When one ends, those that go on have grown as much as it has (the future memory of the Past-Future scheduler,
        Gong et al. 2025).
        """
        per_token, fixed = self
        tokens, most = 0, 0.0
        for number, (more, now) in enumerate(sorted(requests, reverse=True), 1):
            tokens += now
            held = per_token * (tokens + number * more) + number * fixed
            if held > most:
                most = held
        return math.ceil(most - 1e-9)


def footprint(managers: Iterable[Any], longest: int) -> Footprint:
    """The same for all requests: a last block may hold one token only, and windows and states have a size."""
    per_token = fixed = 0.0
    for manager in managers:
        size, most = int(manager.block_size), getattr(manager, "max_admission_blocks_per_request", None)
        if type(manager.kv_cache_spec).__name__.startswith("Mamba"):
            fixed += 1
        elif most is not None and most < longest // size:  # of a window: the blocks behind it come back
            fixed += int(most)
        else:
            per_token += 1 / size
            fixed += 1 - 1 / size
    return Footprint(per_token, fixed)


def fitting(scheduler: Any, layout: Layout, expected: int | None, most: int, last: int) -> int:
    """How many requests, in the order in which they run and then wait, the pool holds to their ends; ``most`` where
    all of them do. May be 0. It is looked for beginning at ``last``, what was found before.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    longest, size = int(scheduler.max_model_len), int(managers[0].block_size)
    lookahead = int(getattr(scheduler, "num_lookahead_tokens", 0))
    taken = footprint(managers, longest)
    queue = list(itertools.islice(itertools.chain(scheduler.running, waiting(scheduler)), most))
    requests = [(to_grow(one, size, longest, lookahead, expected), int(one.num_tokens)) for one in queue]
    room = int(scheduler.kv_cache_manager.block_pool.free_block_queue.num_free_blocks)
    for one in itertools.chain(scheduler.running, getattr(scheduler, "kv_holding_waiting", ())):
        room += layout.blocks_of(one.request_id)
    low, high = 0, len(requests)  # low of them fit
    number = min(last, high)
    while low < high:
        if taken.peak(requests[:number]) <= room:
            low = number
        else:
            high = number - 1
        number = low + 1 if low == last else (low + high + 1) // 2
    return most if low == len(requests) else low


class KvAwareAdmission:
    """Keeps ``max_num_active_reqs`` of one scheduler at what its pool can hold; ``scheduler()`` is None when it died.

    All but ``plan`` run on the engine's thread, or while it is kept from running them.
    """

    def __init__(self, scheduler: Callable[[], Any], layout: Layout, version: str) -> None:
        self._scheduler, self._layout, self._version = scheduler, layout, version
        self.lengths = Lengths()
        self.active = False
        self.changes = 0  # requests that came or ended
        self._looks = 0
        self._before = self._limit = 0
        self._seen: tuple[int, ...] = ()

    def plan(self) -> Effect:
        """What beginning would do now."""
        scheduler = self._scheduler()
        why = self._why_not(scheduler)
        if why:
            return Effect(None, None, why)
        most = int(getattr(scheduler, LIMIT))
        fits = max(1, fitting(scheduler, self._layout, self.lengths.expected(), most, most))
        return Effect(0, None, "" if fits < most else "The pool can hold all requests to their ends.")

    def _why_not(self, scheduler: Any) -> str:
        if scheduler is None:
            return "The scheduler is gone."
        if not hasattr(scheduler, LIMIT):
            return f"The scheduler of vLLM {self._version} has no {LIMIT}."
        return ""

    def begin(self, _: int) -> Result:
        """Lower the limit, and keep it right from now on."""
        scheduler = self._scheduler()
        why = self._why_not(scheduler)
        if why:
            return refused(why)
        if not self.active:
            self._before = self._limit = int(getattr(scheduler, LIMIT))
            self.active, self._seen = True, ()
            self.adjust()
        return Result(True)

    def adjust(self) -> None:
        """Requests may have come, gone or come nearer to their ends: set the limit anew."""
        scheduler = self._scheduler()
        if scheduler is None or not self.active:
            return
        self._looks += 1
        seen = self.changes, len(scheduler.running), len(scheduler.requests), self._looks // LOOKS
        if seen == self._seen:
            return
        self._seen = seen
        now = int(getattr(scheduler, LIMIT))
        if now != self._limit:  # somebody else has set it meanwhile
            self._before = now
        fits = max(1, fitting(scheduler, self._layout, self.lengths.expected(), self._before, self._limit))
        fits += int(getattr(scheduler, "num_waiting_for_streaming_input", 0))  # they count as active
        self._limit = min(self._before, fits)
        setattr(scheduler, LIMIT, self._limit)

    def end(self, _: int) -> Result:
        """Put the limit back, unless somebody else has set it meanwhile."""
        scheduler = self._scheduler()
        if self.active:
            self.active = False
            if scheduler is not None and getattr(scheduler, LIMIT) == self._limit:
                setattr(scheduler, LIMIT, self._before)
        return Result(True)
