"""Tiny random models (no download) and what their caches must hold by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB = 64
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
          "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
# The forward argument is called `cache` from 5.24 and `past_key_values` before (where both may be accepted).
CACHE = "cache" if hasattr(transformers.cache_utils, "KVSharingDict") else "past_key_values"


def build(config: Any, kind: str = "AutoModelForCausalLM", seed: int = 0) -> Any:
    """A model with random weights that generates a fixed number of tokens."""
    torch.manual_seed(seed)
    model = getattr(transformers, kind).from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def config_of(name: str, **changes: Any) -> Any:
    """A configuration class of transformers filled with tiny sizes, or a visible skip where it does not exist."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}.")
    return kind(**COMMON | changes)


def llama(layers: int = 3, seed: int = 0, **changes: Any) -> Any:
    return build(config_of("LlamaConfig", num_hidden_layers=layers, **changes), seed=seed)


def mistral(window: int = 8) -> Any:
    return build(config_of("MistralConfig", sliding_window=window))


def gemma3(window: int = 8) -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return build(config_of("Gemma3TextConfig", sliding_window=window, layer_types=kinds))


def gemma2(window: int = 8) -> Any:
    return build(config_of("Gemma2Config", sliding_window=window, num_hidden_layers=2))


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    return build(config, "AutoModelForSeq2SeqLM")


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=128,
        decoder_start_token_id=2, pad_token_id=0, bos_token_id=1, eos_token_id=None, forced_eos_token_id=None)
    return build(config, "AutoModelForSeq2SeqLM")


def prompt(length: int, rows: int = 1, seed: int = 1) -> Any:
    """Random token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def greedy(model: Any, ids: Any, new: int, **more: Any) -> Any:
    return model.generate(ids, max_new_tokens=new, do_sample=more.pop("do_sample", False), **more)


def row_bytes(model: Any, rows: int = 1) -> int:
    """Bytes of one token position of K and V over all layers, by the configuration."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * rows * heads * width * next(model.parameters()).element_size()


def cache_of(output: Any) -> Any:
    """The cache in an output of generate or of a model, under either name."""
    return output["cache"] if "cache" in output else output["past_key_values"]


def chat(model: Any, cache: Any, length: int, new: int, seed: int = 1, **more: Any) -> Any:
    """A hand-written greedy loop over one cache."""
    ids = prompt(length, seed=seed)
    for _ in range(new):
        with torch.no_grad():
            output = model(input_ids=ids, use_cache=True, **{CACHE: cache}, **more)
        logits = output[0]
        ids = logits[:, -1:].argmax(-1)
    return ids


def same(watch: Any, call: Callable[[], Any]) -> Any:
    """The result of a seeded call, after proving that it is the same without kvobs."""
    watch.bus.active = False
    torch.manual_seed(11)
    expected = call()
    watch.bus.active = True
    watch.events()
    torch.manual_seed(11)
    result = call()
    assert torch.equal(result, expected)
    return result


def named(spans: Any, name: str) -> list[Any]:
    return [span for span in spans.get_finished_spans() if span.name == name]
