"""Conversations with one model, each over a KV cache of its own: every turn prefills only what is new.

Nothing here knows of kvobs: it is the user's side of the demo, plain transformers.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvobs.lab.demo._quiet import quiet

OnText = Callable[[str], None]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch inside the block: a second one gains this small model little (9.6 tokens/s against 8.8),
    and on a busy machine two wait for each other at every layer.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Model:
    """A checkpoint with its tokenizer, and its weights once per device."""

    def __init__(self, directory: Path, devices: Sequence[str] = ("cpu",)) -> None:
        """Load the checkpoint in ``directory`` on each of ``devices``."""
        with quiet():
            self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
            loaded = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
        self.config: Any = loaded.config
        self.on: dict[str, Any] = {device: copy.deepcopy(loaded).to(device) for device in devices[1:]}
        self.on[devices[0]] = loaded.to(devices[0])
        # transformers 5.24 renamed the argument and warns about the older name.
        accepted = inspect.signature(type(loaded).forward).parameters
        self.cache_argument = "cache" if "cache" in accepted else "past_key_values"


class Chat:
    """The conversation so far. Greedy, so the same lines give the same replies."""

    def __init__(self, model: Model, device: str = "cpu") -> None:
        self._model, self.device = model, device
        self.begun = 0
        self.begin()

    def begin(self) -> None:
        """Begin anew, with a new cache."""
        self.begun += 1
        self.cache = DynamicCache(config=self._model.config)
        self._messages: list[dict[str, str]] = []
        self._seen = ""
        self.tokens: list[int] = []

    def has_room(self, line: str, new_tokens: int) -> bool:
        """Whether the line and its reply still fit the model's context."""
        needed = len(self.tokens) + len(self._prompt(line)[1]) + new_tokens
        return not self.tokens or needed <= int(self._model.config.max_position_embeddings)

    def move(self, device: str) -> None:
        """Go on elsewhere: each layer of the cache moves to another device, on which the weights are too."""
        for layer in self.cache.layers:
            layer.device = torch.device(device)
            layer.prefetch()
        self.device = device

    def say(self, line: str, new_tokens: int, on_text: OnText | None = None) -> str:
        """The model's reply to a line of the user.

        Args:
            line: what the user says.
            new_tokens: how many the reply may have.
            on_text: called with the reply's text, piece by piece.
        """
        prompt, new = self._prompt(line)
        ids = torch.tensor([self.tokens + new], device=self.device)
        streamer = _Pieces(self._decode, on_text) if on_text is not None else None
        # The penalty keeps a model of this size from repeating itself; it is as deterministic as greedy search.
        output = self._model.on[self.device].generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, repetition_penalty=1.1,
            max_new_tokens=new_tokens, streamer=streamer, **{self._model.cache_argument: self.cache})
        reply = output[0, ids.shape[1]:].tolist()
        text = self._decode(reply)
        self._messages += [{"role": "user", "content": line}, {"role": "assistant", "content": text}]
        self._seen = prompt + text
        # The template writes the end-of-turn token itself; the model may have been cut off before it.
        self.tokens = output[0].tolist()
        if self.tokens[-1] == self._model.tokenizer.eos_token_id:
            self.tokens.pop()
        return text.strip()

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _prompt(self, line: str) -> tuple[str, list[int]]:
        """The whole conversation with ``line`` as the template writes it, and the token ids of what is new in it."""
        prompt: str = self._model.tokenizer.apply_chat_template(
            [*self._messages, {"role": "user", "content": line}], tokenize=False, add_generation_prompt=True)
        new: list[int] = self._model.tokenizer(prompt[len(self._seen):], add_special_tokens=False)["input_ids"]
        return prompt, new


class _Pieces:
    """A streamer that hands text on as soon as its characters are complete."""

    def __init__(self, decode: Callable[[list[int]], str], on_text: OnText) -> None:
        self._decode, self._on_text = decode, on_text
        self._prompt_pending = True
        self._tokens: list[int] = []
        self._given = 0

    def put(self, tokens: Any) -> None:
        """Take what ``generate`` has: first the prompt, then token by token."""
        if self._prompt_pending:
            self._prompt_pending = False
            return
        self._tokens += tokens.reshape(-1).tolist()
        text = self._decode(self._tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._give(text)

    def end(self) -> None:
        """The reply is complete."""
        self._give(self._decode(self._tokens))

    def _give(self, text: str) -> None:
        if len(text) > self._given:
            self._on_text(text[self._given:])
            self._given = len(text)
