"""The demonstrations: a small chat model, eight turns over one KV cache; or a real vLLM under KV pressure."""

from kvobs.lab.demo._run import run
from kvobs.lab.demo._vllm import run as run_vllm

__all__ = ["run", "run_vllm"]
