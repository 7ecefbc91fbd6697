"""The engine of the experiment: transformers' own cache, filled by a model that has almost nothing else.

K and V are real tensors in a real ``DynamicCache`` on the virtual GPU, in the sizes of a slice of a large model. One
pass stands for ``STEP`` decode steps: the cache grows by as many positions at once, so that a run takes seconds. The
tokens depend on what the cache holds everywhere, so that a cache that was damaged would change them.
"""

from __future__ import annotations

from typing import Any

MIB = 1 << 20
LAYERS, HEADS, WIDTH = 1, 32, 128  # 8 KiB per token of K, or of V, in bfloat16: one of the 32 layers of a Llama 2 7B
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * WIDTH * 2
STEP = 64  # tokens of a session per pass, and per second
VOCABULARY = 512
PROBES = 32  # positions of the cache that a token depends on


def build() -> Any:
    """The model, on the virtual GPU."""
    import torch
    from transformers import LlamaConfig, PreTrainedModel

    class Chat(PreTrainedModel):  # type: ignore[misc]
        """Embeds tokens, keeps K and V of them, and tells tokens by what the cache holds."""

        config_class = LlamaConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
            self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, input_ids: Any, past_key_values: Any = None, **_: Any) -> tuple[Any, Any]:
            """The next ``STEP`` tokens, and the cache."""
            hidden = self.embed(input_ids)
            last = hidden[:, -1]
            for layer in range(LAYERS):
                fresh = hidden[:, None].expand(-1, HEADS, -1, -1)  # a view: what is new in memory is K and V
                keys, values = past_key_values.update(fresh, fresh, layer)
                every = max(1, keys.shape[2] // PROBES)
                last = last + (keys[:, 0, ::every].sum(1) - values[:, -1, 1::every].sum(1)) / PROBES
                del keys, values
            return self.head(last).topk(STEP).indices, past_key_values

    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS,
                         num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH, name_or_path="kvobs-lab")
    model = Chat(config).to(torch.bfloat16).eval()
    torch.nn.init.normal_(model.embed.weight, std=1.0)
    torch.nn.init.normal_(model.head.weight, std=1.0)
    return model.to("vgpu:0")


def cache(model: Any) -> Any:
    """A session's cache, empty."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def follow(model: Any, tokens: list[int], held: Any) -> list[int]:
    """One pass over a session's cache: the next ``STEP`` tokens.

    Raises:
        torch.OutOfMemoryError: the device has no room.
    """
    import torch

    ids = torch.tensor([tokens], dtype=torch.int64, device="vgpu:0")
    with torch.no_grad():
        return [int(token) for token in model(input_ids=ids, past_key_values=held)[0][0].tolist()]
