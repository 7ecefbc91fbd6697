"""The model's words for the breaker: the same events that a real engine's source tells, folded by the same senses.

Told are kv_utilization, waiting, preemption_rate, failure_rate, pool_verdict, hit_rate, out_of_memory and burn_rate,
and headroom: the pool stands for the device, so that headroom is the share of it that no live request holds. Not told,
since nothing in the model is like them: verdict, fragmentation_article, cpu, gateway_p99, pool_use.
"""

from __future__ import annotations

from kvobs import model
from kvobs.breaker._conditions import Reading
from kvobs.breaker._sense import Senses
from kvobs.breaker.simulator._engine import OUT_OF_MEMORY, Engine, Job
from kvobs.breaker.simulator._server import Server
from kvobs.config import TPOT, TTFT, Objective
from kvobs.slo import Ledger

SECOND = 10**9
TOLD = ("kv_utilization", "waiting", "preemption_rate", "failure_rate", "pool_verdict", "hit_rate", "out_of_memory",
        "burn_rate", "headroom")
_ORIGIN = model.Origin("model", "modelled", "Pool", "modelled", "")
_SCOPE = f"{_ORIGIN.model}@{_ORIGIN.device}"


def objectives(server: Server) -> tuple[Objective, Objective]:
    """What the modelled server promises: TTFT and time per output token."""
    return (Objective(name="ttft", signal=TTFT, target=server.target, at_most=round(server.ttft_s * SECOND)),
            Objective(name="tpot", signal=TPOT, target=server.target, at_most=round(server.tpot_s * SECOND)))


def tpot_ns(job: Job) -> int | None:
    """Mean time per output token after the first; None of requests with one token or none."""
    return None if job.generated < 2 else round((job.ended_ns - job.first_ns) / (job.generated - 1))


class Told:
    """The signals of one model engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._senses = Senses()
        self._ledger = Ledger(objectives(engine.server), 0)
        self._standings = self._ledger.standings(0)
        self._judged_ns = 0

    def ended(self, job: Job) -> None:
        """Take a request that ended into account; its time to the first token runs from when it came (again)."""
        first = None if job.first_ns < 0 else job.first_ns - job.arrived_ns
        self._ledger.fold([model.Turn(
            t_ns=job.ended_ns, start_ns=job.arrived_ns, wall_start_ns=0, origin=_ORIGIN, cache_id=0, session="",
            priority="", turn=1, outcome=job.outcome, steps=0, prompt_tokens=job.prompt, cached_tokens=job.hit,
            new_tokens=job.generated, kv_bytes=0, kv_reserved_bytes=0, kv_largest_bytes=0, reallocations=0,
            bytes_written=0, bytes_copied=0, migrations=(), ttft_ns=first, tpot_ns=tpot_ns(job), prefill_ns=None,
            hook_ns=0, trace_id="", span_id="", sampled=False)])
        if job.outcome == OUT_OF_MEMORY:
            self._senses.fold([model.OutOfMemory(job.ended_ns, _ORIGIN, "", "the modelled pool is too small")])

    def signals(self, now_ns: int) -> dict[str, Reading]:
        """All signals as of now. Objectives are judged once per second, as a process does."""
        engine, pool = self._engine, self._engine.pool
        following = engine.next_verdict()
        needs, verdict = following if following is not None else (None, "")
        self._senses.fold([
            model.Blocks(now_ns, _ORIGIN, 0, 1, pool.used, pool.cached, pool.free, 0, engine.failures,
                         engine.preemptions),
            model.PoolWork(now_ns, _ORIGIN, 0, queried_tokens=engine.queried, hit_tokens=engine.hits),
            model.RequestStates(
                now_ns, _ORIGIN, 0, 1, engine.server.slots, (("waiting", "", len(engine.waiting)),), (), 0,
                next_needs=needs, next_verdict=verdict)])
        if now_ns - self._judged_ns >= SECOND:
            self._judged_ns = now_ns
            self._standings = self._ledger.standings(now_ns)
        found = dict(self._senses.signals(now_ns, self._standings)[_SCOPE])
        found["headroom"] = Reading(1 - pool.used / pool.size, now_ns)
        return found
