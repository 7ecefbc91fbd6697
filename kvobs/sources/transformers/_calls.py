"""What a call's arguments and results say: caches, token counts, request parameters. Never their content."""

from __future__ import annotations

from typing import Any

import msgspec
from opentelemetry.util.types import AttributeValue

from kvobs.sources.transformers._layers import layers_of
from kvobs.sources.transformers._turns import LiveTurn

_TOKEN_LIMIT = 4096
_INPUTS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def model_name(model: Any) -> str:
    """The model's name without its directory, else its class name."""
    config = getattr(model, "config", None)
    path = str(getattr(config, "_name_or_path", "") or "")
    name = path.rstrip("/\\").replace("\\", "/").rsplit("/", 1)[-1] or type(model).__name__
    return name.encode("utf-8", "backslashreplace").decode()  # a path may hold bytes that are no text


def cache_in(kwargs: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
    """The cache among a forward call's arguments: ``cache`` from transformers 5.24, ``past_key_values`` before."""
    for name in ("cache", "past_key_values"):
        cache = kwargs.get(name)
        if cache is not None:
            return cache
    return next((value for value in args if not hasattr(value, "shape") and layers_of(value) is not None), None)


def cache_out(output: Any) -> Any:
    """The cache in a model's output (a mapping, or a tuple when ``return_dict=False``)."""
    if isinstance(output, dict):
        return dict.get(output, "cache", dict.get(output, "past_key_values"))
    if isinstance(output, tuple):
        return next((item for item in output[1:] if not isinstance(item, tuple) and layers_of(item) is not None), None)
    return None


def query_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(rows, token positions per row) of a forward call; (1, 0) when its inputs are not recognised."""
    for name in _INPUTS:
        value = kwargs.get(name)
        if value is not None:
            return int(value.shape[0]), int(value.shape[1])
    for value in args:
        shape = getattr(value, "shape", None)
        if shape is not None and len(shape) >= 2:
            return int(shape[0]), int(shape[1])
    return 1, 0


class Call(msgspec.Struct):
    """A generate call: per-row prompt length, input rows, how long the output is without new tokens."""

    cache: Any
    rows: int
    prompt: int
    known: int
    encoder_tokens: int | None
    attributes: dict[str, AttributeValue]
    ids: Any
    mask: Any
    ends: list[int]

    def prompt_tokens(self, turn: LiveTurn) -> tuple[int, int]:
        """Tokens of the whole prompt, and how many of them were cached; the padding of a batch is not counted."""
        if self.encoder_tokens is not None:
            return self.encoder_tokens, 0
        positions = max(turn.prompt, turn.cached)
        if self.mask is not None and self.mask.shape[1] == positions:
            return int(self.mask.sum()), int(self.mask[:, : turn.cached].sum())
        return positions * self.rows, turn.cached * self.rows

    def outcome(self, result: Any, record_tokens: bool) -> tuple[int | None, int, dict[str, AttributeValue]]:
        """(new tokens per row or None when unknown, all new tokens, span attributes that were asked for)."""
        sequences = getattr(result, "sequences", result)
        shape = getattr(sequences, "shape", None)
        if shape is None or len(shape) != 2:
            return None, 0, {}
        attributes: dict[str, AttributeValue] = {}
        if record_tokens:
            if self.ids is not None:
                attributes["kvobs.prompt.token_ids"] = self.ids[0, :_TOKEN_LIMIT].tolist()
            attributes["kvobs.reply.token_ids"] = sequences[0, self.known : self.known + _TOKEN_LIMIT].tolist()
        per_row = max(0, int(shape[1]) - self.known)
        return per_row, _generated(sequences[:, self.known :], self.ends), attributes


def _generated(new: Any, ends: list[int]) -> int:
    """Tokens up to each row's first end token: what follows it is padding."""
    rows, length = int(new.shape[0]), int(new.shape[1])
    if rows == 1 or not ends or not length:
        return rows * length
    ended = sum((new == end).long() for end in ends).clamp(max=1)
    return int((ended.cumsum(1) == ended).logical_and(ended.cumsum(1) <= 1).sum())


def _end_tokens(value: Any) -> list[int]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [] if value is None else [int(end) for end in (value if isinstance(value, list | tuple) else [value])]


def describe(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """What a generate call asks for."""
    ids = next((kwargs[name] for name in ("inputs", "input_ids") if kwargs.get(name) is not None),
               args[0] if args else None)
    embeds = kwargs.get("inputs_embeds")
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    ids = ids if hasattr(ids, "shape") else None
    shape = ids.shape if ids is not None else embeds.shape if embeds is not None else (1, 1)
    rows, length = int(shape[0]), int(shape[1]) if len(shape) > 1 else 1
    known, encoder_tokens, prompt = (length if ids is not None else 0), None, length
    if encoder_decoder:
        start = kwargs.get("decoder_input_ids")
        known = prompt = int(start.shape[1]) if start is not None else 1
        encoder_tokens = rows * length if len(shape) == 2 else 0
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    attributes: dict[str, AttributeValue] = {}
    for key, name in (("max_tokens", "max_new_tokens"), ("temperature", "temperature"), ("top_p", "top_p"),
                      ("top_k", "top_k")):
        value = kwargs.get(name, getattr(config, name, None))
        if isinstance(value, int | float) and not isinstance(value, bool):
            attributes[f"gen_ai.request.{key}"] = value
    mask = kwargs.get("attention_mask") if rows > 1 else None
    return Call(cache_in(kwargs), rows, prompt, known, encoder_tokens, attributes,
                ids if ids is not None and len(shape) == 2 else None,
                mask if len(getattr(mask, "shape", ())) == 2 else None,
                _end_tokens(kwargs.get("eos_token_id", getattr(config, "eos_token_id", None))))
