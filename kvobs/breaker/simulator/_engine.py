"""A paged server with continuous batching, step by step, as vLLM's first-come-first-served scheduler works.

A step first serves who runs, in the order of admission, one token each or a part of the prompt, until its token budget
is spent; who needs a block that cannot be had takes it from the one admitted last, who loses all blocks and goes to
the head of the queue (preemption by recompute; its own blocks are gone, chunks of prefixes stay cached). If nobody was
preempted, the queue is admitted from its head while budget, slots and blocks last. A request that the whole pool
cannot hold ends out of memory when it alone needs more than there is.

Not modelled: several GPUs, speculative decoding, CUDA graphs, time of the scheduler itself, hits inside a chunk.
"""

from __future__ import annotations

from collections import deque

from kvobs.allocator.paged import PagedState, paged_verdict
from kvobs.breaker.simulator._pool import Pool
from kvobs.breaker.simulator._server import BLOCK_TOKENS, Server
from kvobs.breaker.simulator._trace import Request

SECOND = 10**9
OK, OUT_OF_MEMORY = "ok", "out_of_memory"


class Job:
    """A request inside the server. ``computed`` of its ``known`` tokens have KV; its blocks have ``room``."""

    __slots__ = ("arrived_ns", "chunks", "computed", "ended_ns", "first_ns", "found", "generated", "held", "high",
                 "hit", "known", "now", "number", "outcome", "output", "preemptions", "prompt", "room")

    def __init__(self, number: int, request: Request, output: int, arrived_ns: int) -> None:
        self.number, self.prompt, self.output, self.arrived_ns = number, request.prompt, output, arrived_ns
        self.chunks = request.chunks
        self.known = request.prompt
        self.computed = self.high = self.generated = self.room = self.preemptions = self.now = 0
        self.held: list[int] = []  # its chunks
        self.found = 0  # of its chunks, those that it passed: held, or made by another at the same time
        self.hit = 0  # tokens that it found in the prefix cache before it had ever had them
        self.first_ns = self.ended_ns = -1
        self.outcome = ""

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""
        return self.room // BLOCK_TOKENS


class Engine:
    """The server. ``schedule`` begins a step and says how long it takes, ``complete`` ends it."""

    def __init__(self, server: Server, chunk_tokens: int) -> None:
        self.server, self.chunk_tokens = server, chunk_tokens
        self.pool = Pool(server.blocks, chunk_tokens // BLOCK_TOKENS, server.host_blocks)
        self.careful = False  # level 1: admit only what is expected to fit to its end
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.ended: list[Job] = []  # to be taken by whoever runs the engine
        self.preemptions = self.failures = self.computed = self.recomputed = self.queried = self.hits = 0
        self._step: list[Job] = []
        self._context = 0  # tokens of KV that those who run have
        self._done, self._done_tokens = 0, 0  # requests that ended, and what they generated

    @property
    def busy(self) -> bool:
        """Whether anybody is in it."""
        return bool(self.running or self.waiting)

    def arrive(self, job: Job) -> None:
        """Take a request into the queue."""
        self.waiting.append(job)

    def schedule(self, now_ns: int) -> int | None:
        """Begin a step: its duration in nanoseconds, or None if nobody is left."""
        while self.busy:
            self._step = []
            budget, preempted = self._serve(now_ns)
            fetched = 0 if preempted else self._admit(budget, now_ns)
            if self._step:
                tokens = sum(job.now for job in self._step)
                server = self.server
                seconds = (server.step_s + server.token_s * tokens + server.context_s * (self._context + tokens)
                           + server.host_s * fetched)
                self.computed += tokens
                return max(1, round(seconds * SECOND))
        return None

    def complete(self, now_ns: int) -> None:
        """End the step: tokens are there, and who has all of them leaves."""
        left = False
        for job in self._step:
            if job.computed < job.high:
                self.recomputed += min(job.high, job.computed + job.now) - job.computed
            job.computed += job.now
            self._context += job.now
            if job.computed > job.high:
                job.high = job.computed
            if job.chunks:
                self._register(job)
            if job.computed == job.known:
                job.generated += 1
                job.known += 1
                if job.generated == 1:
                    job.first_ns = now_ns
                if job.generated == job.output:
                    self._end(job, OK, now_ns)
                    left = True
        self._step = []
        if left:
            self.running = [job for job in self.running if not job.outcome]

    def _register(self, job: Job) -> None:
        """Chunks that a request has just filled can be found from now on."""
        while job.found < len(job.chunks) and job.computed >= (job.found + 1) * self.chunk_tokens:
            chunk = job.chunks[job.found]
            if self.pool.register(chunk):
                job.held.append(chunk)
            job.found += 1

    # -- a step ----------------------------------------------------------------------------------------

    def _serve(self, now_ns: int) -> tuple[int, bool]:
        """Blocks for those who run; what is left of the budget, and whether anybody was preempted."""
        budget, preempted, index = self.server.budget, False, 0
        running, step = self.running, self._step
        while index < len(running) and budget:
            job = running[index]
            new = job.known - job.computed
            job.now = new if new < budget else budget
            lacking = job.computed + job.now - job.room
            if lacking > 0:
                need = -(-lacking // BLOCK_TOKENS)
                while not self.pool.take(need):
                    self.failures += 1
                    preempted = True
                    victim = running.pop()
                    self._release(victim, now_ns)
                    if victim is job and not running:
                        self._end(job, OUT_OF_MEMORY, now_ns)
                    else:
                        self.preemptions += 1
                        victim.preemptions += 1
                        self.waiting.appendleft(victim)
                    if victim is job:
                        return budget, True
                job.room += need * BLOCK_TOKENS
            budget -= job.now
            step.append(job)
            index += 1
        return budget, preempted

    def _admit(self, budget: int, now_ns: int) -> int:
        """Requests from the head of the queue; how many blocks come from the host."""
        pool, waiting, running, fetched = self.pool, self.waiting, self.running, 0
        while waiting and budget and len(running) < self.server.slots:
            job = waiting[0]
            if self.careful and running and not self._fits(job):
                break
            hits, idle, host = pool.found(job.chunks, self._most_hits(job))
            hit = hits * self.chunk_tokens
            new = min(job.known - hit, budget)
            need = -(-(hit + new) // BLOCK_TOKENS) - (hits - host) * pool.chunk_blocks
            if need > pool.free + pool.cached - idle * pool.chunk_blocks:
                self.failures += 1
                if running:
                    break
                self._end(waiting.popleft(), OUT_OF_MEMORY, now_ns)
                continue
            waiting.popleft()
            pool.pick(job.chunks[:hits])
            pool.take(need)
            fetched += pool.hold(job.chunks[:hits]) * pool.chunk_blocks
            job.held, job.found = list(job.chunks[:hits]), hits
            self.queried += job.known
            self.hits += hit
            job.hit += max(0, hit - job.high)
            job.computed, job.high, job.now = hit, max(job.high, hit), new
            job.room = -(-(hit + new) // BLOCK_TOKENS) * BLOCK_TOKENS
            self._context += hit
            budget -= new
            running.append(job)
            self._step.append(job)
        return fetched

    def _most_hits(self, job: Job) -> int:
        """Chunks that may be found: at least one token is computed, since its result is the next token."""
        return (job.known - 1) // self.chunk_tokens

    def _fits(self, job: Job) -> bool:
        """Whether a request is expected to fit beside those who run, to the end of all of them."""
        return self._expected(job) + sum(self._expected(one) for one in self.running) <= self.pool.size

    def _expected(self, job: Job) -> int:
        guess = -(-self._done_tokens // self._done) if self._done else self.server.guess_tokens
        return max(job.blocks, -(-(job.prompt + max(job.generated, guess)) // BLOCK_TOKENS))

    def _release(self, job: Job, now_ns: int) -> None:
        self.pool.give(job.blocks - len(job.held) * self.pool.chunk_blocks)
        self.pool.let_go(job.held, now_ns)
        self._context -= job.computed
        job.held, job.found, job.room, job.computed = [], 0, 0, 0

    def _end(self, job: Job, outcome: str, now_ns: int) -> None:
        if outcome == OK:
            self._release(job, now_ns)
            self._done += 1
            self._done_tokens += job.generated
        job.outcome, job.ended_ns = outcome, now_ns
        self.ended.append(job)

    # -- what it says of itself ------------------------------------------------------------------------

    def next_verdict(self) -> tuple[int, str] | None:
        """Blocks that the head of the queue needs, and what would become of it now; None if nobody waits."""
        if not self.waiting:
            return None
        job, pool = self.waiting[0], self.pool
        hits, idle, host = pool.found(job.chunks, self._most_hits(job))
        there = (hits - host) * pool.chunk_blocks
        needs = -(-job.known // BLOCK_TOKENS) - there
        state = PagedState(pool.size, pool.used, pool.cached - idle * pool.chunk_blocks, pool.free)
        return needs, paged_verdict(needs, state, found=there)[0]
