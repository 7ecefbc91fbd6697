"""Every cache class: what a turn reports against closed forms and an independent look at every storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

from tests.contract import ledger, tiny

pytestmark = pytest.mark.torch
PROMPT, NEW = 6, 8


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


def observed(watch: Any, model: Any, ids: Any, new: int = NEW, **more: Any) -> tuple[Any, ledger.Counter, Any]:
    """(turn, independent counter, cache) of one generate call, whose tokens equal those without kvobs."""
    watch.bus.active = False
    torch.manual_seed(5)
    expected = tiny.greedy(model, ids, new, **{k: v() if callable(v) else v for k, v in more.items()})
    watch.bus.active = True
    watch.events()
    torch.manual_seed(5)
    given = {k: v() if callable(v) else v for k, v in more.items()}
    with ledger.Counter() as counter:
        output = tiny.greedy(model, ids, new, return_dict_in_generate=True, **given)
    assert torch.equal(output.sequences, expected)
    return watch.turn(), counter, tiny.cache_of(output)


def agree(turn: Any, counter: ledger.Counter, cache: Any) -> None:
    """The turn and the independent counter say the same."""
    assert (turn.outcome, turn.reallocations) == ("ok", counter.reallocations)
    assert turn.bytes_written == counter.written
    assert turn.bytes_written + turn.bytes_copied == counter.replaced_bytes
    assert (turn.kv_reserved_bytes, turn.kv_largest_bytes) == (ledger.reserved(cache), ledger.largest(cache))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_dynamic_cache_follows_the_arithmetic_series(watch: Any, llama: Any, rows: int) -> None:
    """2 x layers re-allocations per pass, each token written once, all that was held copied with every later token."""
    turn, counter, cache = observed(watch, llama, tiny.prompt(PROMPT, rows))
    row, last = tiny.row_bytes(llama, rows), PROMPT + NEW - 1
    agree(turn, counter, cache)
    assert turn.steps == NEW
    assert turn.reallocations == 2 * 3 * NEW
    assert turn.bytes_written == last * row
    assert turn.bytes_copied == row * sum(range(PROMPT, last))
    assert turn.kv_bytes == turn.kv_reserved_bytes == last * row
    assert turn.kv_largest_bytes == last * row // 6
    assert (turn.prompt_tokens, turn.cached_tokens, turn.new_tokens) == (rows * PROMPT, 0, rows * NEW)
    assert (turn.origin.cache, turn.origin.device, turn.origin.dtype) == ("DynamicCache", "cpu", "float32")
    assert 0 < turn.prefill_ns <= turn.ttft_ns
    assert 0 < turn.tpot_ns * (NEW - 1) <= turn.t_ns - turn.start_ns


def test_the_same_cache_is_the_next_turn_of_its_session(watch: Any, llama: Any) -> None:
    """Over four turns only the new part is written, everything held is copied once per pass, turns count from 1."""
    cache, ids, row = transformers.DynamicCache(config=llama.config), tiny.prompt(5), tiny.row_bytes(llama)
    held, ratios, sessions = 0, [], set()
    for number in range(1, 5):
        with ledger.Counter() as counter:
            ids = tiny.greedy(llama, ids, 4, **{tiny.CACHE: cache})
        turn = watch.turn()
        agree(turn, counter, cache)
        now = ids.shape[1] - 1
        assert (turn.turn, turn.steps, turn.reallocations) == (number, 4, 24)
        assert (turn.prompt_tokens, turn.cached_tokens, turn.new_tokens) == (ids.shape[1] - 4, held, 4)
        assert turn.bytes_written == (now - held) * row
        assert turn.bytes_copied == row * (held + sum(range(now - 3, now)))
        assert turn.kv_bytes == now * row
        ratios.append(turn.bytes_copied / turn.bytes_written)
        held = now
        sessions.add((turn.session, turn.cache_id))
        ids = torch.cat([ids, tiny.prompt(3, seed=number)], dim=1)
    assert ratios == sorted(ratios)
    assert len(sessions) == 1


def test_a_static_cache_is_reserved_once(watch: Any, llama: Any) -> None:
    """No re-allocation and no copy; held grows to the tokens seen while reserved is the whole length from the start."""
    long = {tiny.CACHE: lambda: transformers.StaticCache(config=llama.config, max_cache_len=40)}
    turn, counter, cache = observed(watch, llama, tiny.prompt(PROMPT), **long)
    row, last = tiny.row_bytes(llama), PROMPT + NEW - 1
    assert (turn.reallocations, turn.bytes_copied, counter.reallocations) == (0, 0, 0)
    assert turn.bytes_written == counter.written == last * row
    assert (turn.kv_bytes, turn.kv_reserved_bytes) == (last * row, 40 * row)
    assert turn.kv_reserved_bytes == ledger.reserved(cache)
    assert turn.kv_largest_bytes == 40 * row // 6
    assert turn.origin.cache == "StaticCache"


def test_a_static_cache_goes_on_in_the_next_turn(watch: Any, llama: Any) -> None:
    """The second turn over the same static buffers writes only its own tokens."""
    cache, row = transformers.StaticCache(config=llama.config, max_cache_len=40), tiny.row_bytes(llama)
    ids = tiny.greedy(llama, tiny.prompt(PROMPT), 4, **{tiny.CACHE: cache})
    watch.events()
    ids = tiny.greedy(llama, torch.cat([ids, tiny.prompt(2)], dim=1), 4, **{tiny.CACHE: cache})
    turn = watch.turn()
    assert (turn.turn, turn.cached_tokens, turn.reallocations) == (2, 9, 0)
    assert turn.kv_bytes == (ids.shape[1] - 1) * row
    assert turn.bytes_written == (ids.shape[1] - 1 - 9) * row


@pytest.mark.parametrize("length", [3, 8, 20])
@pytest.mark.parametrize("make", [tiny.mistral, tiny.gemma2, tiny.gemma3])
def test_sliding_windows_hold_what_the_storages_hold(watch: Any, make: Callable[[], Any], length: int) -> None:
    """Growing windows, alone or mixed with full attention: every token is written once, storages are the reserve."""
    model = make()
    turn, counter, cache = observed(watch, model, tiny.prompt(length), 12)
    agree(turn, counter, cache)
    layers = len(cache.layers)
    total = length + 11
    slides = [getattr(layer, "is_sliding", False) for layer in cache.layers]
    each = tiny.row_bytes(model) // layers
    assert turn.reallocations == 2 * layers * 12
    assert turn.kv_bytes == each * sum(min(total, 7) if s else total for s in slides)
    assert turn.bytes_written == each * layers * total


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("make", [tiny.mistral, tiny.gemma3])
def test_static_sliding_windows_are_written_in_place(watch: Any, make: Callable[[], Any], length: int) -> None:
    """A full static window still takes every new token, and never moves."""
    model = make()
    turn, counter, cache = observed(watch, model, tiny.prompt(length), 12, cache_implementation="static")
    total, window = length + 11, 8
    each = tiny.row_bytes(model) // len(cache.layers)
    slides = [layer.is_sliding for layer in cache.layers]
    assert (turn.reallocations, turn.bytes_copied, counter.reallocations) == (0, 0, 0)
    assert turn.kv_bytes == each * sum(min(total, window) if s else total for s in slides)
    assert turn.kv_reserved_bytes == ledger.reserved(cache)
    assert turn.bytes_written == each * sum(min(length, window) + 11 if s else total for s in slides)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("make", [tiny.t5, tiny.bart])
def test_cross_attention_is_filled_once(watch: Any, make: Callable[[], Any], static: bool) -> None:
    """An encoder-decoder cache: cross-attention holds the encoder's length from the first pass on, untouched."""
    model = make()
    more = {"cache_implementation": "static"} if static else {}
    turn, counter, cache = observed(watch, model, tiny.prompt(7, 2), **more)
    each = 2 * 2 * 4 * 8 * 4  # K and V, two rows, four heads, eight wide, four bytes
    layers = 2
    assert (turn.steps, turn.prompt_tokens, turn.cached_tokens, turn.new_tokens) == (NEW, 14, 0, 2 * NEW)
    assert turn.kv_bytes == each * layers * (7 + NEW)
    assert turn.kv_reserved_bytes == ledger.reserved(cache)
    assert turn.kv_largest_bytes == ledger.largest(cache)
    assert turn.bytes_written == counter.written == each * layers * (7 + NEW)
    assert turn.reallocations == counter.reallocations == (0 if static else 2 * layers * (NEW + 1))
    assert turn.bytes_copied == (0 if static else each * layers * sum(range(1, NEW)))
    assert turn.origin.cache == "EncoderDecoderCache"
    assert 0 < turn.prefill_ns <= turn.ttft_ns


QUANTIZED = {
    "fp8": ({}, "Fp8QuantizedLayer"),
    "quanto": ({"nbits": 4, "q_group_size": 8, "residual_length": 4}, "QuantoQuantizedLayer"),
    "hqq": ({"nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 8, "residual_length": 4}, "HQQQuantizedLayer"),
}


def quantized(backend: str, config: Any) -> Any:
    settings, kind = QUANTIZED[backend]
    if not hasattr(transformers.cache_utils, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}.")
    try:
        return transformers.QuantizedCache(backend, config, **settings)
    except ImportError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("backend", list(QUANTIZED))
def test_quantized_caches_hold_their_quantized_bytes(watch: Any, llama: Any, backend: str) -> None:
    """Held is what the quantized storages weigh, below the unquantized size; written + copied = what was replaced."""
    quantized(backend, llama.config)
    turn, counter, cache = observed(
        watch, llama, tiny.prompt(PROMPT), past_key_values=lambda: quantized(backend, llama.config))
    assert turn.origin.cache == QUANTIZED[backend][1]
    assert turn.kv_reserved_bytes == ledger.reserved(cache)
    assert turn.kv_largest_bytes == ledger.largest(cache)
    assert turn.kv_bytes == sum(t.nbytes for layer in cache.layers for t in ledger.tensors_of(layer).values())
    assert turn.kv_bytes < (PROMPT + NEW - 1) * tiny.row_bytes(llama)
    assert turn.reallocations == counter.reallocations
    assert turn.bytes_written + turn.bytes_copied == counter.replaced_bytes
    assert turn.cached_tokens == 0


def test_fp8_stores_one_byte_per_value_and_a_scale_per_tensor(watch: Any, llama: Any) -> None:
    """The closed form of the 8-bit cache: a quarter of float32, plus four bytes for each K and each V."""
    turn, _, _ = observed(watch, llama, tiny.prompt(PROMPT), past_key_values=lambda: quantized("fp8", llama.config))
    assert turn.kv_bytes == (PROMPT + NEW - 1) * tiny.row_bytes(llama) // 4 + 4 * 2 * 3
    assert turn.bytes_written == turn.kv_bytes
    assert turn.bytes_copied == tiny.row_bytes(llama) // 4 * sum(range(PROMPT, PROMPT + NEW - 1))


HYBRIDS = {
    "MambaConfig": {"state_size": 4},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "JambaConfig": {"num_experts": 2, "num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
                    "expert_layer_period": 2, "use_mamba_kernels": False},
    "Lfm2Config": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3},
    "Qwen3NextConfig": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "FalconH1Config": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8,
                       "mamba_n_groups": 1},
    "Gemma3nTextConfig": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "vocab_size_per_layer_input": 64,
        "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
    "DeepseekV3Config": {
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 6,
        "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3,
        "moe_intermediate_size": 16, "num_key_value_heads": 4},
}


@pytest.mark.parametrize("name", list(HYBRIDS))
def test_states_shared_layers_and_unequal_heads(watch: Any, name: str) -> None:
    """Linear-attention states are held, never written; shared layers hold nothing; K and V may differ in width."""
    model = tiny.build(tiny.config_of(name, **HYBRIDS[name]))
    turn, counter, cache = observed(watch, model, tiny.prompt(PROMPT))
    if not hasattr(cache, "layers"):
        pytest.skip(f"{name} of transformers {transformers.__version__} has a cache of its own kind.")
    agree(turn, counter, cache)
    assert turn.kv_bytes == sum(t.nbytes for layer in cache.layers for t in ledger.tensors_of(layer).values())


@pytest.mark.parametrize("kind", ["DynamicIndexedLayer", "StaticIndexedLayer"])
def test_indexer_keys_count_like_keys(watch: Any, llama: Any, kind: str) -> None:
    """Sparse attention's index keys are context: held by tokens, reserved by storage, re-allocated where they grow."""
    layer_kind = getattr(transformers.cache_utils, kind, None)
    if layer_kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}.")
    static = kind.startswith("Static")
    layers = [layer_kind(max_cache_len=32) if static else layer_kind() for _ in range(3)]
    cache = transformers.cache_utils.Cache(layers=layers)

    def forward(*args: Any, original: Any = llama.model.forward, **kwargs: Any) -> Any:
        for layer in layers:
            layer.update_indexer(torch.zeros(1, (kwargs.get("input_ids")).shape[1], 4))
        return original(*args, **kwargs)

    llama.model.forward = forward
    try:
        with ledger.Counter() as counter:
            tiny.greedy(llama, tiny.prompt(PROMPT), NEW, **{tiny.CACHE: cache})
    finally:
        del llama.model.forward
    turn, total = watch.turn(), PROMPT + NEW - 1
    row = tiny.row_bytes(llama) + 3 * 4 * 4
    assert turn.kv_bytes == total * row
    assert turn.kv_reserved_bytes == ledger.reserved(cache) == (32 if static else total) * row
    assert turn.bytes_written == counter.written == total * row
    assert turn.reallocations == counter.reallocations == (0 if static else 3 * 3 * NEW)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_rotated_beam_cache_is_copied_as_a_whole(watch: Any, llama: Any, rows: int) -> None:
    """Beam search re-orders every buffer after every pass: those copies are counted, as are the pass's own."""
    reordered = []
    original = transformers.DynamicCache.reorder_cache

    def reorder(self: Any, index: Any) -> None:
        original(self, index)
        reordered.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers))

    transformers.DynamicCache.reorder_cache = reorder
    try:
        turn, counter, cache = observed(watch, llama, tiny.prompt(PROMPT, rows), num_beams=3, num_return_sequences=2)
    finally:
        del transformers.DynamicCache.reorder_cache
    reordered = reordered[len(reordered) // 2:]
    assert len(reordered) >= NEW - 1
    assert turn.reallocations == counter.reallocations + 6 * len(reordered)
    assert turn.bytes_written == counter.written
    assert turn.bytes_copied == counter.replaced_bytes - counter.written + sum(reordered)
    assert turn.kv_reserved_bytes == ledger.reserved(cache)
    assert (turn.prompt_tokens, turn.new_tokens) == (rows * PROMPT, rows * 2 * NEW)


def test_half_precision_halves_every_byte(watch: Any) -> None:
    """Bytes come from the tensors: bfloat16 halves them and is named."""
    model = tiny.llama().to(torch.bfloat16)
    turn, _, _ = observed(watch, model, tiny.prompt(PROMPT))
    assert (turn.kv_bytes, turn.origin.dtype) == ((PROMPT + NEW - 1) * tiny.row_bytes(model), "bfloat16")
    assert tiny.row_bytes(model) == 2 * 3 * 2 * 8 * 2
