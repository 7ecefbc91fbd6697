"""A trace through the model engine under a policy: one discrete-event simulation, the same each time.

Events at the same instant come in this order: the end of a step, arrivals, the breaker's tick (every 0.25 s), the
beginning of a step. A tick inside a step sees the engine as the step began.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import msgspec

from kvobs.breaker._states import Policy, Transition
from kvobs.breaker.simulator._engine import OK, Engine, Job
from kvobs.breaker.simulator._gate import Gate, share
from kvobs.breaker.simulator._server import Server
from kvobs.breaker.simulator._signals import Told, tpot_ns
from kvobs.breaker.simulator._trace import Trace

SECOND = 10**9
TICK_NS = SECOND // 4
TELL_EVERY = 500  # events between two words on progress
REFUSED, CUT = "refused", "cut"
_NEVER = 1 << 62


class Ended(msgspec.Struct, frozen=True, gc=False):
    """How a request ended: ``ok``, ``cut`` (finished with less output than it asked for), ``refused`` (for good) or
    ``out_of_memory``. ``ttft_ns`` is what its user saw, from its first arrival on, refusals included; ``computed`` are
    positions that had KV in the end, or before they were lost; ``hit`` those of them that came from the prefix cache.
    """

    number: int
    outcome: str
    prompt: int
    asked: int
    generated: int
    ttft_ns: int | None
    tpot_ns: int | None
    refusals: int
    preemptions: int
    hit: int
    computed: int


class Run(msgspec.Struct, frozen=True):
    """What became of a trace. ``ended`` is in the order of the trace; tokens and blocks are counts over the run."""

    policy: str
    ended: tuple[Ended, ...]
    duration_ns: int
    transitions: tuple[Transition, ...]
    level_s: tuple[float, ...]
    computed: int
    recomputed: int
    queried: int
    hits: int
    evictions: int
    offloaded: int
    fetched: int
    dropped: int
    preemptions: int
    failures: int


class _Simulation:
    def __init__(self, trace: Trace, server: Server, policy: Policy | None, seed: int) -> None:
        self.trace, self.server, self.seed = trace, server, seed
        self.engine = Engine(server, trace.chunk_tokens)
        self.told = Told(self.engine)
        self.gate = Gate(policy, self.engine, seed) if policy is not None else None
        self.ended: dict[int, Ended] = {}
        self.refusals: dict[int, int] = {}
        self.back: list[tuple[int, int]] = []  # when refused requests come back, and which
        self.next = 0
        self.now = 0

    def run(self, progress: Callable[[int, int], None]) -> None:
        requests, engine, gate = self.trace.requests, self.engine, self.gate
        step_ends, tick, events = _NEVER, TICK_NS if gate is not None else _NEVER, 0
        while len(self.ended) < len(requests):
            arrival = requests[self.next].arrival_ns if self.next < len(requests) else _NEVER
            coming = min(arrival, self.back[0][0] if self.back else _NEVER)
            if step_ends == _NEVER and engine.busy and min(coming, tick) > self.now:
                lasts = engine.schedule(self.now)
                self._settle()
                step_ends = _NEVER if lasts is None else self.now + lasts
                continue
            self.now = min(step_ends, coming, tick)
            if self.now == step_ends:
                engine.complete(self.now)
                step_ends = _NEVER
                self._settle()
            elif self.now == coming:
                self._arrive(arrival)
            elif gate is not None:
                gate.tick(self.told.signals(self.now), self.now)
                tick += TICK_NS
            events += 1
            if events % TELL_EVERY == 0:
                progress(len(self.ended), len(requests))

    def _arrive(self, arrival: int) -> None:
        if self.now == arrival:
            number = self.next
            self.next += 1
        else:
            _, number = heapq.heappop(self.back)
        request = self.trace.requests[number]
        output = request.output if self.gate is None else self.gate.limit(number, request, self.now)
        if output is not None:
            self.engine.arrive(Job(number, request, output, self.now))
            return
        refusals = self.refusals[number] = self.refusals.get(number, 0) + 1
        if refusals > self.server.retries:
            self.ended[number] = Ended(number, REFUSED, request.prompt, request.output, 0, None, None, refusals, 0, 0,
                                       0)
            return
        wait = self.server.retry_s * (1 + 0.5 * share("retry", self.seed, number, refusals))
        heapq.heappush(self.back, (self.now + round(wait * SECOND), number))

    def _settle(self) -> None:
        """Take note of those who ended."""
        for job in self.engine.ended:
            request = self.trace.requests[job.number]
            self.told.ended(job)
            if self.gate is not None:
                ttft = job.first_ns - job.arrived_ns
                self.gate.ended(job, in_time=job.first_ns >= 0 and ttft <= self.server.ttft_s * SECOND)
            outcome = CUT if job.outcome == OK and job.generated < request.output else job.outcome
            self.ended[job.number] = Ended(
                job.number, outcome, job.prompt, request.output, job.generated,
                None if job.first_ns < 0 else job.first_ns - request.arrival_ns, tpot_ns(job),
                self.refusals.get(job.number, 0), job.preemptions, job.hit, job.high)
        self.engine.ended.clear()


def simulate(trace: Trace, server: Server, policy: Policy | None, *, seed: int = 0,
             progress: Callable[[int, int], None] = lambda done, of: None) -> Run:
    """A trace through the server under a policy, or without a breaker.

    Args:
        progress: called now and then with how many requests have ended, and how many there are.
    """
    made = _Simulation(trace, server, policy, seed)
    made.run(progress)
    engine, gate, pool = made.engine, made.gate, made.engine.pool
    return Run(
        policy.name if policy is not None else "no breaker",
        tuple(made.ended[number] for number in range(len(trace.requests))), made.now,
        tuple(gate.transitions) if gate is not None else (), tuple(gate.seconds) if gate is not None else (),
        engine.computed, engine.recomputed, engine.queried, engine.hits, pool.evictions, pool.offloaded, pool.fetched,
        pool.dropped, engine.preemptions, engine.failures)
