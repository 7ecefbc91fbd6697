"""The demo's vLLM, in a process of the Python that has vLLM: ``python -m kvobs.lab.demo._vllm_child SETTINGS``.

It serves the dialogues under kvobs and writes JSON lines to the pipe that it is given: first what it does and how far
it is, last what vLLM's own metrics and kvobs's said. Standard output and error are vLLM's.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import kvobs
from kvobs.lab.demo import _vllm_script as script

Tell = Callable[..., None]
SAMPLE = 1.0  # the share of blocks that vLLM's own sampler follows: all of them


class Own:
    """vLLM's own metrics, as its /metrics would show them at this moment."""

    def __init__(self) -> None:
        registry = importlib.import_module("prometheus_client").REGISTRY
        self._all: Any = registry
        self._preemptions: Any = registry.restricted_registry([script.PREEMPTIONS])
        self.counted: list[int] = []  # Unix nanoseconds at which the counter had grown, once per preemption

    def look(self) -> None:
        """After a step: has the counter of preemptions grown?"""
        value = sum(sample.value for metric in self._preemptions.collect() for sample in metric.samples
                    if sample.name == script.PREEMPTIONS)
        self.counted += [time.time_ns()] * (round(value) - len(self.counted))

    def figures(self) -> dict[str, float]:
        """Every sample by its name, summed over its labels; of histograms sum and count."""
        found: dict[str, float] = {}
        for metric in self._all.collect():
            for sample in metric.samples if metric.name.startswith("vllm:") else ():
                if not sample.name.endswith(("_bucket", "_created")):
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found


def load(model: str, name: str) -> Any:
    """Start vLLM on the CPU with a pool that is too small for all sessions at once."""
    # Many CPUs have no arithmetic for bfloat16.
    return importlib.import_module("vllm").LLM(
        model=model, served_model_name=name, dtype="float32", max_model_len=script.CONTEXT,
        max_num_seqs=len(script.DIALOGUES), block_size=script.BLOCK_TOKENS, num_gpu_blocks_override=script.POOL_BLOCKS,
        kv_cache_memory_bytes=64 << 20, enable_prefix_caching=True, enforce_eager=True, disable_log_stats=False,
        kv_cache_metrics=True, kv_cache_metrics_sample=SAMPLE)


def observed(handle: Any) -> list[list[Any]]:
    """The counters and gauges of the pool by kvobs: name, attributes, value."""
    handle.flush()
    return [[row.name, dict(zip(row.attributes, attributes, strict=True)), value]
            for row, points in handle.runtime.metrics.collect() if row.name.startswith(("kvobs.kv.", "kvobs.prefix."))
            for attributes, value in points.items() if isinstance(value, (int, float))]


def serve(llm: Any, own: Own, handle: Any, tell: Tell) -> list[dict[str, Any]]:
    """Both turns of all sessions; what was said of each once it was over."""
    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    # The penalty keeps a model of this size from repeating itself.
    sampling = importlib.import_module("vllm").SamplingParams(
        temperature=0, repetition_penalty=1.1, max_tokens=script.NEW_TOKENS, min_tokens=script.NEW_TOKENS)
    said: dict[str, list[dict[str, str]]] = {name: [] for name in script.DIALOGUES}
    told = []
    for turn in range(script.TURNS):
        names: dict[str, str] = {}
        for name, lines in script.DIALOGUES.items():
            said[name].append({"role": "user", "content": lines[turn]})
            tokens = tokenizer.apply_chat_template(said[name], add_generation_prompt=True, return_dict=False)
            names[f"{name}-{turn + 1}"] = name
            with kvobs.session(name):
                engine.add_request(f"{name}-{turn + 1}", {"prompt_token_ids": list(tokens)}, sampling)
        made: dict[str, int] = dict.fromkeys(names, 0)
        while engine.has_unfinished_requests():
            for output in engine.step():
                made[output.request_id] = len(output.outputs[0].token_ids)
                if output.finished:
                    said[names[output.request_id]].append({"role": "assistant", "content": output.outputs[0].text})
            own.look()
            tell(turn=turn + 1, tokens=sum(made.values()), of=len(names) * script.NEW_TOKENS)
        told.append({"engine": own.figures(), "kvobs": observed(handle)})
    return told


def main() -> None:
    """Serve, tell, and end."""
    given = json.loads(sys.argv[1])
    with open(given["pipe"], "w", encoding="utf-8") as pipe:
        def tell(**message: Any) -> None:
            print(json.dumps(message), file=pipe, flush=True)

        with kvobs.instrument(**given["settings"]) as handle:
            if handle.runtime is None:
                sys.exit("kvobs did not start; its log line above says why.")
            llm = load(given["model"], given["name"])
            tell(loaded=importlib.import_module("vllm").__version__, endpoint=handle.endpoint)
            own = Own()
            turns = serve(llm, own, handle, tell)
            process = handle.runtime.process_id
        tell(turns=turns, counted=own.counted, process=process)


if __name__ == "__main__":
    main()
