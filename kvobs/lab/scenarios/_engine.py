"""The engine of the scenarios: a tiny Llama with random weights, whose KV buffers have round sizes."""

from __future__ import annotations

import inspect
from typing import Any

from kvobs.sessions import session

LAYERS = 2
BUFFERS = 2 * LAYERS  # K and V of each layer
BUFFER_BYTES_PER_TOKEN = 8 * 64 * 4  # of one of them: 8 heads of 64 float32 numbers
BYTES_PER_TOKEN = BUFFERS * BUFFER_BYTES_PER_TOKEN
PROMPT, NEW = 8, 4  # tokens of a turn; the last new one is in the cache only after the next turn
MIB = 1 << 20
NAME = "kvobs-scenario"


class Engine:
    """The model, on one or more virtual devices. Its weights and activations need less than 6 MiB of each."""

    def __init__(self, devices: int = 1) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        self._torch = torch
        # transformers 5.24 renamed the argument and warns about the older name.
        accepted = inspect.signature(LlamaForCausalLM.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        torch.manual_seed(7)
        self.config = LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=8,
            num_key_value_heads=8, head_dim=64, max_position_embeddings=1 << 17, bos_token_id=None, eos_token_id=None,
            pad_token_id=0, name_or_path=NAME)
        loaded = LlamaForCausalLM(self.config).eval()
        loaded.generation_config.eos_token_id = None
        weights = loaded.state_dict()
        self._on: list[Any] = []
        for index in range(devices):
            model = LlamaForCausalLM(self.config).eval()
            model.load_state_dict(weights)
            model.generation_config.eos_token_id = None
            self._on.append(model.to(f"vgpu:{index}"))

    def static(self, tokens: int) -> Any:
        """A cache that takes room for so many tokens when it is first used."""
        from transformers import StaticCache

        return StaticCache(config=self.config, max_cache_len=tokens)

    def dynamic(self) -> Any:
        """A cache that grows with what it holds."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def turn(self, name: str, cache: Any, tokens: Any = None, device: int = 0) -> Any:
        """A turn of a session over its cache: ``PROMPT`` tokens after ``tokens``, ``NEW`` ones in reply; all of them.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        torch, model = self._torch, self._on[device]
        said = torch.arange(1, PROMPT + 1).reshape(1, PROMPT)
        ids = said if tokens is None else torch.cat((tokens, said), dim=1)
        there = ids.to(f"vgpu:{device}")
        with session(name), torch.no_grad():
            found = model.generate(there, attention_mask=torch.ones_like(there), max_new_tokens=NEW, do_sample=False,
                                   **{self._cache_argument: cache})
        return found.cpu()


def cached(turns: int) -> int:
    """Tokens in a cache after so many turns."""
    return turns * (PROMPT + NEW) - 1
