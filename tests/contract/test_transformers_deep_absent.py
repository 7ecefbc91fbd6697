"""Where deep sampling sees nothing it says why; where it fails nobody but the log notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvobs import model
from tests.contract import tiny

pytestmark = pytest.mark.torch


def fact(watch: Any) -> model.Availability:
    return next(found for found in watch.source.availability() if found.subject == "attention")


def test_availability_says_off(watch: Any) -> None:
    """Without deep sampling attention is unavailable, and the reason says how to switch it on; nothing is patched."""
    before = getattr(transformers.modeling_utils.AttentionInterface, "get_interface", None)
    assert not hasattr(before, "__wrapped__")
    assert not hasattr(transformers.cache_utils.Cache.update, "__wrapped__")
    assert fact(watch) == model.Availability("attention", False,
                                             "Deep sampling is off; --deep or KVOBS_DEEP=on switches it on.")


def test_availability_before_and_after(deep: Any) -> None:
    """Before a decode step nothing was sampled; after one, attention is available."""
    assert fact(deep) == model.Availability("attention", False, "No decode step was sampled yet.")
    tiny.greedy(tiny.llama(), tiny.prompt(12), 4)
    assert fact(deep) == model.Availability("attention", True, "")


def test_models_without_the_interface_say_so(deep: Any) -> None:
    """Bloom computes attention by itself: no sample, the reason by name, update times all the same."""
    net = tiny.build(transformers.BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=2, n_head=4,
                                              pad_token_id=0, bos_token_id=1, eos_token_id=None))
    tiny.same(deep, lambda: tiny.greedy(net, tiny.prompt(12), 8))
    tiny.greedy(net, tiny.prompt(12), 8)
    events = deep.events()
    assert not [event for event in events if isinstance(event, model.Attention)]
    assert [event for event in events if isinstance(event, model.CacheUpdates)]
    assert fact(deep).reason == ("Not sampled: BloomForCausalLM: its attention does not go through the attention "
                                 "interface of transformers.")
    assert not fact(deep).available


def test_masks_that_are_functions_say_so(deep: Any) -> None:
    """A back end whose masks are no tensors (as flex_attention's) gives no sample but its reason."""
    from transformers import AttentionInterface, AttentionMaskInterface

    class Opaque:
        pass

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        causal = query.shape[2] > 1
        found = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=causal)
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register("opaque", attend)
    AttentionMaskInterface.register("opaque", lambda *args, **kwargs: Opaque())
    try:
        net = tiny.llama()
        net.set_attn_implementation("opaque")
        tiny.greedy(net, tiny.prompt(12), 8)
    finally:
        del AttentionInterface._global_mapping["opaque"]
        del AttentionMaskInterface._global_mapping["opaque"]
    assert not deep.of(model.Attention)
    assert "masks of opaque are functions, which cannot be read" in fact(deep).reason


@pytest.fixture(scope="module")
def compiler() -> None:
    """Dynamo's first compilation patches nn.Module for good: not within a test, where it would look like ours."""
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))


def nothing(deep: Any) -> str:
    """Why nothing was sampled, after proving that nothing was and that no hook failed."""
    assert not deep.of(model.Attention, model.HookFailed)
    assert not fact(deep).available
    return fact(deep).reason


def test_flex_attention_says_so(deep: Any, compiler: None) -> None:
    """The block masks of flex_attention are functions: no sample but the reason, the same tokens."""
    net = tiny.llama(layers=1, head_dim=16)
    net.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # transformers would compile it, for half a minute
        tiny.same(deep, lambda: tiny.greedy(net, tiny.prompt(12), 3))
    assert nothing(deep) == ("Not sampled: LlamaForCausalLM: the masks of flex_attention are functions, which cannot "
                             "be read.")


def test_continuous_batching_says_so(deep: Any) -> None:
    """A paged cache is not sampled: the reason names it."""
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators",
                        reason="This transformers is older than 5.18; kvobs does not follow its continuous batching.")
    net = tiny.llama()
    net.set_attn_implementation("sdpa")
    net.generate_batch(
        tiny.prompt(12, 2).tolist(),
        generation_config=transformers.GenerationConfig(do_sample=False, max_new_tokens=4, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64))
    assert nothing(deep) == "Not sampled: LlamaForCausalLM: a PagedAttentionCache has no layers of its own to look at."


def test_generating_without_a_cache_says_so(deep: Any) -> None:
    """Passes that keep no cache cannot be sampled: the reason says it."""
    tiny.greedy(tiny.llama(), tiny.prompt(12), 4, use_cache=False)
    assert nothing(deep) == "Not sampled: LlamaForCausalLM: its forward passes keep no cache."


def test_compiled_decoding_says_so(deep: Any, compiler: None) -> None:
    """A compiled decode never asks for an attention function: the reason says it."""
    config = transformers.CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    tiny.greedy(tiny.llama(layers=1), tiny.prompt(6), 5, cache_implementation="static", compile_config=config)
    assert nothing(deep) == "Not sampled: LlamaForCausalLM: compiled decoding never asks for an attention function."


def test_quantized_caches_say_so(deep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a token takes in a quantized cache is not known: the reason says it."""
    from transformers.cache_utils import DynamicLayer

    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    monkeypatch.setattr(DynamicLayer, "_quantized_keys", None, raising=False)
    tiny.chat(net, cache, 12, 3)
    assert nothing(deep) == ("Not sampled: LlamaForCausalLM: its cache is quantized, and what one of its tokens takes "
                             "is not known.")


def test_layers_that_share_keys_say_so(deep: Any) -> None:
    """Where some layers read the keys of others nothing is summed over only a part of them."""
    net = tiny.llama()
    net.model.layers[2].self_attn.is_kv_shared_layer = True
    tiny.greedy(net, tiny.prompt(12), 4)
    assert nothing(deep) == "Not sampled: LlamaForCausalLM: some of its layers read the keys and values of others."


def test_unknown_ways_to_weigh_keys_say_so(deep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention call with arguments that change its weights in an unknown way gives no sample but a reason."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs, block_indices=torch.zeros(1))

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    net = tiny.llama()
    tiny.greedy(net, tiny.prompt(12), 4)
    assert nothing(deep) == ("Not sampled: LlamaForCausalLM: sdpa chooses keys or weighs them in a way that kvobs does "
                             "not know.")


def test_an_older_transformers_says_so(watching: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AttentionInterface.get_interface (transformers 5.0) the rest is observed and the reason is given."""
    interface = transformers.modeling_utils.AttentionInterface
    original = getattr(interface, "get_interface", None)
    monkeypatch.delattr(interface, "get_interface", raising=False)
    watch = watching(deep=True)
    version = transformers.__version__
    assert fact(watch).reason == f"transformers {version} is older than the attention interface that kvobs looks at."
    if original is not None:  # the models of this version cannot run without it
        interface.get_interface = original
    tiny.greedy(tiny.llama(), tiny.prompt(12), 3)
    assert watch.turn().steps == 3


def test_a_probe_that_raises_is_detached(deep: Any, monkeypatch: pytest.MonkeyPatch,
                                         caplog: pytest.LogCaptureFixture) -> None:
    """A failing probe is reported once and taken away; tokens are those of an unobserved run."""
    from kvobs.sources.transformers._attention import AttentionProbe

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no")

    net = tiny.llama()
    expected = tiny.greedy(net, tiny.prompt(12), 8)
    deep.events()
    monkeypatch.setattr(AttentionProbe, "layer", broken)
    cache = transformers.DynamicCache(config=net.config)
    assert torch.equal(tiny.greedy(net, tiny.prompt(12), 8, **{tiny.CACHE: cache}), expected)
    assert [failure.hook for failure in deep.of(model.HookFailed)] == ["AttentionInterface.get_interface"]
    assert fact(deep).reason == "A hook of deep sampling failed and was detached."
    assert len(caplog.records) == 1


def test_masks_of_their_own_for_each_head_say_so(deep: Any) -> None:
    """A boolean mask that differs between heads would be read as its first head's: no sample, but the reason."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def by_head(*args: Any, **kwargs: Any) -> Any:
        mask = transformers.masking_utils.sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False})
        return mask.expand(-1, 4, -1, -1).clone()

    AttentionInterface.register("by_head", transformers.integrations.sdpa_attention.sdpa_attention_forward)
    AttentionMaskInterface.register("by_head", by_head)
    try:
        net = tiny.llama()
        net.set_attn_implementation("by_head")
        tiny.greedy(net, tiny.prompt(12), 8)
    finally:
        del AttentionInterface._global_mapping["by_head"]
        del AttentionMaskInterface._global_mapping["by_head"]
    assert not deep.of(model.Attention)
    assert "by_head is given a mask of its own for each head" in fact(deep).reason
