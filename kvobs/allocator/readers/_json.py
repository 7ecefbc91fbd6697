"""Snapshots written as JSON. Events stay bytes until their turn: their frames would fill the memory otherwise."""

from __future__ import annotations

import re
from typing import Any, TypedDict

import msgspec

from kvobs.allocator.readers import _snapshot
from kvobs.allocator.readers._limits import Refused
from kvobs.allocator.readers._pickle import Data, Progress
from kvobs.allocator.recording import Recording

_LIST = re.compile(rb"\s*\[\s*[{\]]")


class _Document(msgspec.Struct):
    """Only what is read; ``traceEvents`` tells a trace from a snapshot."""

    segments: Any = msgspec.UNSET
    device_traces: list[list[msgspec.Raw]] | msgspec.UnsetType = msgspec.UNSET
    external_annotations: Any = msgspec.UNSET
    allocator_settings: Any = msgspec.UNSET


class _Event(TypedDict, total=False):
    action: Any
    addr: Any
    device_free: Any
    size: Any
    stream: Any
    time_us: Any
    pool_id: Any
    segment_pool_id: Any
    mempool_id: Any
    compile_context: Any
    user_metadata: Any
    frames: msgspec.Raw


def parse(data: Data, name: str, progress: Progress = lambda done: None) -> Recording:
    """Read a snapshot from JSON.

    Raises:
        Refused: it is not one.
    """
    try:
        if _LIST.match(data):
            return _snapshot.recording(msgspec.json.decode(data), name, progress)
        told = msgspec.json.decode(data, type=_Document)
        document = {key: value for key in _Document.__struct_fields__
                    if (value := getattr(told, key)) is not msgspec.UNSET}
        return _snapshot.recording(document, name, progress, _rows)
    except msgspec.ValidationError as error:
        raise Refused(f"It is JSON, but no snapshot of torch's allocator ({str(error)[:200]}).") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # older msgspec has the latter for what is no UTF-8
        raise Refused(f"It is damaged or cut off: it is no valid JSON ({str(error)[:200]}).") from None
    except RecursionError:
        raise Refused("It is JSON that is nested too deeply; a snapshot has six levels.") from None


_DECODER = msgspec.json.Decoder(type=_Event)


def _rows(chunk: list[Any]) -> list[dict[str, Any]]:
    decode = _DECODER.decode
    return [decode(event) for event in chunk]  # type: ignore[misc]
