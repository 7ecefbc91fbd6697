"""The modelled server: its constants, where each comes from, and how they are changed.

A step takes ``step_s + token_s x tokens computed + context_s x tokens of KV that are read``: the time to read the
weights, to compute, and to read the cache, added up, where hardware overlaps them in part.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

import msgspec

BLOCK_TOKENS = 16  # of a block, as vLLM's default on GPUs


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of a server and of those who use it; ``CONSTANTS`` says what each means. Times in seconds."""

    blocks: int = 11_987
    slots: int = 256
    budget: int = 8_192
    step_s: float = 0.0186
    token_s: float = 88.7e-6
    context_s: float = 151.7e-9
    host_blocks: int = 16_384
    host_s: float = 84e-6
    guess_tokens: int = 256
    clamp_tokens: int = 128
    retry_s: float = 5.0
    retries: int = 3
    sheddable: float = 0.3
    critical: float = 0.1
    ttft_s: float = 2.0
    tpot_s: float = 0.2
    target: float = 0.99


class Constant(msgspec.Struct, frozen=True):
    """A row of the table: what is allowed, what it means, where the default comes from."""

    name: str
    low: float
    high: float
    unit: str
    meaning: str
    source: str


# Llama-3-8B in bf16 (8.03e9 parameters, 32 layers, 8 KV heads of 128: 131,072 B of KV per token) on one L40S (data
# sheet: 48 GB, 864 GB/s, 362 TFLOP/s dense bf16).
CONSTANTS = (
    Constant("blocks", 1, 10**8, "{block}", "blocks of 16 tokens in the KV pool",
             "(0.9 x 48 GB - 16.06 GB of weights - 2 GB of activations, assumed) / 2 MiB"),
    Constant("slots", 1, 10**6, "{request}", "requests that run at once", "vLLM's max_num_seqs on large GPUs"),
    Constant("budget", 1, 10**7, "{token}", "tokens computed per step",
             "vLLM's max_num_batched_tokens of its server on large GPUs"),
    Constant("step_s", 0, 100, "s", "of a step whatever is in it", "16.06 GB of weights / 864 GB/s"),
    Constant("token_s", 0, 10, "s", "per token computed",
             "2 x 8.03e9 FLOP / (362 TFLOP/s x 0.5, an assumed utilisation)"),
    Constant("context_s", 0, 1, "s", "per token of KV read", "131,072 B / 864 GB/s"),
    Constant("host_blocks", 0, 10**9, "{block}", "blocks of host memory for level 2", "32 GiB / 2 MiB, assumed"),
    Constant("host_s", 0, 10, "s", "per block fetched back from the host", "2 MiB / 25 GB/s of PCIe 4.0 x16, assumed"),
    Constant("guess_tokens", 1, 10**6, "{token}",
             "output that level 1 expects of a request until one has ended, then their mean", "assumed"),
    Constant("clamp_tokens", 1, 10**6, "{token}", "most output of normal requests while level 3 is open", "assumed"),
    Constant("retry_s", 0.001, 10**6, "s", "Retry-After of a refusal, up to a half more by jitter", "assumed"),
    Constant("retries", 0, 1000, "{time}", "how often a refused request comes back before it gives up", "assumed"),
    Constant("sheddable", 0, 1, "1", "share of requests with the priority sheddable", "assumed"),
    Constant("critical", 0, 1, "1", "share of requests with the priority critical", "assumed"),
    Constant("ttft_s", 1e-6, 10**6, "s", "objective: most time to the first token", "assumed"),
    Constant("tpot_s", 1e-6, 10**6, "s", "objective: most time per output token", "assumed"),
    Constant("target", 0.001, 0.999999, "1", "share of requests that must meet each objective, for the burn rate",
             "assumed"),
)
_BY_NAME = {constant.name: constant for constant in CONSTANTS}


def server_with(changes: Iterable[str]) -> Server:
    """The server with some constants changed, each ``NAME=VALUE``.

    Raises:
        ValueError: one whole sentence: which change, what is wrong, what is allowed.
    """
    server = Server()
    for change in changes:
        name, separator, text = (part.strip() for part in change.partition("="))
        if not separator or not text:
            raise ValueError(f"{change!r} is not of the form NAME=VALUE, such as blocks=2000.")
        if name not in _BY_NAME:
            near = difflib.get_close_matches(name, _BY_NAME, n=1)
            raise ValueError(f"The modelled server has no constant {name!r}; "
                             + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(_BY_NAME)}."))
        server = msgspec.structs.replace(server, **{name: _value(_BY_NAME[name], text)})
    if server.sheddable + server.critical > 1:
        raise ValueError("The shares of sheddable and critical requests are more than 1 together.")
    return server


def _value(constant: Constant, text: str) -> float | int:
    kind = type(getattr(Server(), constant.name))
    try:
        value = kind(text)
        if not (math.isfinite(value) and constant.low <= value <= constant.high):
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise ValueError(f"The constant {constant.name} is {text!r}; allowed is "
                         f"{'a whole number' if kind is int else 'a number'} from {constant.low:g} to "
                         f"{constant.high:g}.") from None
    return int(value) if kind is int else float(value)
