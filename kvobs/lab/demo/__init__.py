"""The demonstration: a real small chat model on the CPU, eight turns over one KV cache, observed by kvobs."""

from kvobs.lab.demo._run import run

__all__ = ["run"]
