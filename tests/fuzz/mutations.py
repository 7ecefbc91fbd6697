"""Ways to damage a file: byte by byte, opcode by opcode of a pickle, and value by value of what it describes."""

from __future__ import annotations

import copy
import json
import pickle
import pickletools
import random
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

Mutation = Callable[[random.Random, bytes, bytes], bytes]
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF, 1 << 40,
            (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
# Opcodes that torch never writes, whole: code, calls, references, bombs, other containers.
_HOSTILE = (
    b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"ios\nsystem\n", b"R", b"b", b"o", b"\x81", b"\x92", b"Pid\n",
    b"Q", b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00", b"r\xff\xff\xff\x7f", b"r\x00\x00\x00\x01", b"q\xff",
    b"\x96" + b"\xff" * 7 + b"\x00", b"\x8d" + b"\xff" * 7 + b"\x00", b"\x8e" + b"\x00" * 5 + b"\x01\x00\x00",
    b"X\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8, b"\x8b\xff\xff\xff\x7f", b"\x8a\xff", b"I" + b"9" * 40 + b"\n",
    b"L1L\n", b"F1e999\n", b"V\\ud800\n", b"S'x'\n", b"p9999999\n", b"g0\n", b"h\xff", b"j\xff\xff\xff\xff", b"2", b"0",
    b"1", b"(", b".", b"]", b"}", b")", b"t", b"\x85", b"\x86", b"\x87", b"d", b"l", b"a", b"e", b"s", b"u", b"\x8f",
    b"\x90", b"\x91", b"\x97", b"\x98", b"\x94", b"N", b"\x88", b"\x89", b"G\x7f\xf8" + b"\x00" * 6, b"C\x01x",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x00", b"\x8c\x02\xed\xa0",
    b"\x8c\x03\xed\xa0\x80")
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 511, 512, 1 << 20, (1 << 31) - 1, 1 << 40, 1 << 50, (1 << 63) - 1, 1 << 63, 1 << 64,
    1 << 200, -(1 << 63), 0.0, 1.5, float("inf"), float("nan"), "", "x", "alloc", "oom", "inactive", "\ud800",
    "9" * 5000, [], {}, [[]], [{}], [None], [1, 2], [0, 0], [0], {"frames": []}, {"name": 1}, [0] * 3)


def damaged_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """One to four changes that know nothing of the format."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not changed:
            break
        at = rng.randrange(len(changed))
        match rng.randrange(9):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.randrange(256)
            case 2:
                del changed[at:]
            case 3:
                del changed[at:at + rng.randrange(1, 16)]
            case 4:
                changed[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 5:
                changed[at:at] = changed[at:at + rng.randrange(1, 64)]
            case 6:
                width = rng.choice((1, 2, 4, 8))
                value = rng.choice(_NUMBERS) % (1 << 8 * width)
                changed[at:at + width] = value.to_bytes(width, rng.choice(("little", "big")))
            case 7:
                changed[at:] = other[rng.randrange(len(other) + 1):]
            case _:
                changed[at:at + 1] = changed[at:at + 1] * rng.choice((2, 50, 2000))
    return bytes(changed)


def damaged_opcodes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A pickle with whole opcodes dropped, doubled, exchanged, or put in."""
    codes = list(_opcodes(data))
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, len(codes))
        match rng.randrange(6):
            case 0:
                del codes[at]
            case 1:
                codes.insert(at, codes[rng.randrange(len(codes))])
            case 2:
                codes[at] = rng.choice(_HOSTILE)
            case 3:
                codes.insert(at, rng.choice(_HOSTILE))
            case 4:
                codes.insert(at, rng.choice(_HOSTILE) * rng.choice((2, 30, 1000)))
            case _:
                end = rng.randrange(at, min(at + 20, len(codes)))
                codes[at:at] = codes[at:end] * rng.choice((1, 3))
        if len(codes) < 2:
            break
    return b"".join(codes)


def damaged_values(write: Callable[[Any], bytes]) -> Mutation:
    """A document with values of other types and sizes, keys lost or renamed, and items doubled; then written."""
    def mutate(rng: random.Random, data: bytes, other: bytes) -> bytes:
        document = pickle.loads(_document(data))
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            document = _changed(rng, document)
        try:
            return write(document)
        except (ValueError, OverflowError, RecursionError):  # JSON has no such number
            return data
    return mutate


def _changed(rng: random.Random, document: Any) -> Any:
    holder, key = None, None
    node = document
    while isinstance(node, dict | list) and node and (holder is None or rng.random() < 0.8):
        holder = node
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node = holder[key]
    if holder is None or rng.random() < 0.01:
        return rng.choice(_VALUES)
    match rng.randrange(6):
        case 0 if isinstance(holder, dict):
            del holder[key]
        case 0 | 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(node))
        case 1:
            holder[rng.choice(("x", "addr", "device_free", "history", "frames", "address"))] = holder.pop(key)
        case 2 if type(node) is int:
            holder[key] = node + rng.choice((-1, 1, 511, -512, 1 << 30, -(1 << 62)))
        case 3:
            holder[key] = [node]
        case _:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
    return document


@lru_cache(maxsize=64)
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    starts = [position or 0 for _, _, position in pickletools.genops(data)]
    return tuple(data[start:end] for start, end in pairwise([*starts, len(data)]))


@lru_cache(maxsize=64)
def _document(data: bytes) -> bytes:
    return data if data[:1] == b"\x80" else pickle.dumps(json.loads(data))
