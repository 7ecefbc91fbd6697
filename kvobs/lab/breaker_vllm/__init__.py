"""The breaker on a real vLLM server under KV pressure, with and without: ``python -m kvobs.lab.breaker_vllm``."""
