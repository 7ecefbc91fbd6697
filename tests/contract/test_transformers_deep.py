"""Deep sampling in real models: equal to brute force, harmless, and honest about what it cannot see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvobs import model
from kvobs.sources.transformers._cadence import BURST
from tests.contract import tiny
from tests.contract.attention_reference import Reference, Sums, entries

pytestmark = [pytest.mark.torch, pytest.mark.skipif(
    not hasattr(transformers.modeling_utils.AttentionInterface, "get_interface"),
    reason="transformers 5.0 has no place where attention could be looked at; the source says so (tested apart).")]
FLASH = "two_dimensional_masks"
STEPS = 40


def gpt_oss() -> Any:
    return tiny.build(tiny.config_of("GptOssConfig", num_local_experts=2, num_experts_per_tok=1, sliding_window=8,
                                     layer_types=["sliding_attention", "full_attention", "sliding_attention"]))


def qwen3() -> Any:
    return tiny.build(tiny.config_of("Qwen3Config"))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny.llama, "mistral": tiny.mistral, "gemma2": tiny.gemma2, "gemma3": tiny.gemma3, "gpt_oss": gpt_oss,
    "qwen3": qwen3}


def flash_like(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
               sliding_window: int | None = None, **_: Any) -> tuple[Any, None]:
    """Attention as flash kernels take it: a 2-D padding mask or none, causality and the window applied inside."""
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    rows, columns = query.shape[2], key.shape[2]
    place = torch.arange(columns - rows, columns)[:, None]
    column = torch.arange(columns)[None]
    allowed = column <= place
    if sliding_window is not None:
        allowed &= place - column < sliding_window
    allowed = allowed[None, None].expand(query.shape[0], 1, rows, columns)
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None, -columns:].bool()
    logits = (query @ keys.transpose(2, 3)) * scaling
    weights = torch.softmax(logits.masked_fill(~allowed, torch.finfo(logits.dtype).min), -1)
    return (weights @ values).transpose(1, 2).contiguous(), None


@pytest.fixture
def flash() -> Iterator[None]:
    """A back end that is handed masks as flash attention is."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(FLASH, flash_like)
    AttentionMaskInterface.register(FLASH, transformers.masking_utils.flash_attention_mask)
    yield
    del AttentionInterface._global_mapping[FLASH]
    del AttentionMaskInterface._global_mapping[FLASH]


def decode(net: Any, ids: Any, mask: Any, steps: int, **more: Any) -> tuple[Any, list[Any]]:
    """Prefill and greedy decode by hand: the tokens that were fed, and the output of every decode pass."""
    cache, outputs, fed = transformers.DynamicCache(config=net.config), [], [ids]
    kwargs: dict[str, Any] = {tiny.CACHE: cache}
    with torch.no_grad():
        out = net(input_ids=ids, attention_mask=mask, use_cache=True, **kwargs)
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            fed.append(token)
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            out = net(input_ids=token, attention_mask=mask, use_cache=True, **kwargs, **more)
            outputs.append(out)
    return torch.cat(fed, 1), outputs


class Spy:
    """Keeps the queries and keys of every attention call with one query per row."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.calls = inner, list[tuple[Any, Any]]()

    def __call__(self, module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if query.shape[2] == 1:
            self.calls.append((query[:, :, 0].tolist(), key.tolist()))
        return self.inner(module, query, key, *args, **kwargs)


def brute_force(build: Callable[[], Any], ids: Any, mask: Any, steps: int,
                monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Sums]]:
    """The same decode with eager attention that hands out its weights, counted by plain loops."""
    net = build()
    net.set_attn_implementation("eager")
    spies: list[Spy] = []
    interface = transformers.modeling_utils.AttentionInterface
    original = interface.get_interface

    def spying(self: Any, name: str, default: Any) -> Any:
        spies.append(Spy(original(self, name, default)))
        return spies[-1]

    with monkeypatch.context() as patch:
        patch.setattr(interface, "get_interface", spying)
        _, outputs = decode(net, ids, mask, steps, output_attentions=True)
    calls = [call for spy in spies for call in spy.calls]
    text = net.config.get_text_config()
    layers = len(outputs[0].attentions)
    every = ["full" if net.config.model_type == "llama" else "sliding"] * layers
    kinds = ["sliding" if "sliding" in kind else "full" for kind in getattr(text, "layer_types", None) or every]
    heads = text.num_key_value_heads
    reference = Reference(2 * heads * text.head_dim * 4)
    found: dict[str, list[Sums]] = {kind: [] for kind in kinds}
    for step, output in enumerate(outputs):
        sums = {kind: Sums() for kind in found}
        seen = ids.shape[1] + step + 1
        for layer, weights in enumerate(output.attentions):
            length = weights.shape[-1]
            window = text.sliding_window if kinds[layer] == "sliding" else length
            queries, keys = calls[step * layers + layer]
            for row in range(ids.shape[0]):
                padding = [*mask[row].tolist(), *[1] * (step + 1)][seen - length:]
                valid = [bool(there) and length - 1 - j < window for j, there in enumerate(padding)]
                reference.row(sums[kinds[layer]], layer, row, weights[row, :, 0].tolist(), valid, seen)
                entries(sums[kinds[layer]], queries[row], keys[row], valid)
        for kind, sum_ in sums.items():
            found[kind].append(sum_)
    return found


def padded(rows: int, length: int) -> tuple[Any, Any]:
    """Prompts of which every second row is shorter, padded on the left."""
    ids, mask = tiny.prompt(length, rows), torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows, 2):
        ids[row, :5 + row], mask[row, :5 + row] = 0, 0
    return ids, mask


def compare(samples: list[Any], expected: dict[str, list[Sums]]) -> None:
    for kind, sums in expected.items():
        of_kind = [sample for sample in samples if sample.layers == kind]
        assert len(of_kind) == len(sums)
        for sample, wanted in zip(of_kind, sums, strict=True):
            for name, value in asdict(wanted).items():
                assert getattr(sample, name) == pytest.approx(value, rel=1e-4, abs=1e-4), (kind, name)
    assert {sample.layers for sample in samples} == set(expected)


# Soft caps and learnable sinks are eager's: transformers refuses sdpa for them, and the test's FLASH has neither.
PAIRS = [(name, backend) for name in MODELS for backend in ("eager", "sdpa", FLASH)
         if backend == "eager" or name not in ("gemma2", "gpt_oss")]


@pytest.mark.parametrize(("name", "backend"), PAIRS)
@pytest.mark.parametrize("rows", [1, 3])
def test_samples_equal_brute_force(deep: Any, flash: None, monkeypatch: pytest.MonkeyPatch, name: str, backend: str,
                                   rows: int) -> None:
    """Every field equals loops over eager attention's own weights, queries and keys to 1e-4, step by step."""
    net = MODELS[name]()
    net.set_attn_implementation(backend)
    ids, mask = padded(rows, 20) if rows > 1 else (tiny.prompt(20), torch.ones(1, 20, dtype=torch.long))
    decode(net, ids, mask, STEPS)
    samples = deep.of(model.Attention)
    deep.bus.active = False
    compare(samples, brute_force(MODELS[name], ids, mask, STEPS, monkeypatch))
    assert any(sample.pending for sample in samples) or name != "llama"


def test_static_caches_count_only_what_is_filled(deep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a static cache the empty places are no tokens, no blocks and no entries."""
    net = tiny.llama()
    tiny.greedy(net, tiny.prompt(20), STEPS, cache_implementation="static", disable_compile=True)
    static = deep.of(model.Attention)
    tiny.greedy(net, tiny.prompt(20), STEPS)
    dynamic = deep.of(model.Attention)
    assert len(static) == len(dynamic) == STEPS - 1
    for left, right in zip(static, dynamic, strict=True):
        for field in ("tokens", "queries", "entries", "alive", "blocks", "pending", "reclaimable_bytes"):
            assert getattr(left, field) == getattr(right, field)
        assert left.local_sum == pytest.approx(right.local_sum, rel=1e-4)


CALLS: dict[str, Callable[[Any], Any]] = {
    "greedy": lambda net: tiny.greedy(net, tiny.prompt(12), 20),
    "sampling": lambda net: tiny.greedy(net, tiny.prompt(12), 20, do_sample=True),
    "beams": lambda net: tiny.greedy(net, tiny.prompt(12), 20, num_beams=3),
    "padded": lambda net: net.generate(padded(3, 12)[0], attention_mask=padded(3, 12)[1], max_new_tokens=20,
                                       do_sample=False),
    "static": lambda net: tiny.greedy(net, tiny.prompt(12), 20, cache_implementation="static", disable_compile=True),
    "assisted": lambda net: tiny.greedy(net, tiny.prompt(12), 20, prompt_lookup_num_tokens=3),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_same(deep: Any, name: str, call: str) -> None:
    """A seeded call gives the same tokens with deep sampling in every step as without kvobs."""
    net = MODELS[name]()
    tiny.same(deep, lambda: CALLS[call](net))
    assert deep.source._deep is not None
    assert not deep.of(model.HookFailed)


@pytest.mark.parametrize("build", [tiny.bart, tiny.t5])
def test_decoders_of_encoder_decoders_are_sampled(deep: Any, build: Callable[[], Any]) -> None:
    """Of an encoder-decoder the decoder's self-attention is sampled, cross-attention is not; tokens are the same."""
    net = build()
    tiny.same(deep, lambda: tiny.greedy(net, tiny.prompt(12), 20))
    tiny.greedy(net, tiny.prompt(12), 20)
    samples = deep.of(model.Attention)
    assert samples
    assert all(sample.tokens <= 21 for sample in samples)
    assert samples[-1].entries == samples[-1].tokens * 2 * 4  # two decoder layers of four heads


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("build", [tiny.bart, tiny.t5])
def test_decoders_equal_brute_force(deep: Any, build: Callable[[], Any], backend: str) -> None:
    """Position biases and all: the weights' sums equal loops over those that eager attention hands out, to 1e-4."""
    net, steps = build(), 30
    net.set_attn_implementation(backend)
    tiny.greedy(net, tiny.prompt(12), steps)
    samples = deep.of(model.Attention)
    deep.bus.active = False
    net.set_attn_implementation("eager")
    output = tiny.greedy(net, tiny.prompt(12), steps, return_dict_in_generate=True, output_attentions=True)
    reference = Reference(2 * 4 * 8 * 4)
    expected = []
    for layers in output.decoder_attentions[1:]:  # the first pass is the prompt's
        sums = Sums()
        for layer, weights in enumerate(layers):
            length = weights.shape[-1]
            reference.row(sums, layer, 0, weights[0, :, 0].tolist(), [True] * length, length)
        expected.append(asdict(sums))
    assert len(samples) == len(expected) == steps - 1
    for sample, wanted in zip(samples, expected, strict=True):
        for name in wanted.keys() - {"entries", "alive"}:  # these need queries and keys, and are tested above
            assert getattr(sample, name) == pytest.approx(wanted[name], rel=1e-4, abs=1e-4), name


def test_a_rewrite_forgets_the_states(deep: Any) -> None:
    """After a crop every block is Active again: what was known of it is not carried over."""
    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    tiny.chat(net, cache, 20, 10)
    assert deep.of(model.Attention)[-1].pending > 0
    cache.crop(-4)
    tiny.chat(net, cache, 1, 2)
    after = deep.of(model.Attention)
    assert [sample.pending for sample in after] == [0, 0]


def test_threads_are_sampled_apart(deep: Any) -> None:
    """Two threads that decode at once give the samples that they give one after the other."""
    nets = [tiny.llama(), tiny.gemma3()]
    lengths = (12, 30)

    def run(index: int) -> None:
        tiny.greedy(nets[index], tiny.prompt(lengths[index]), 25)

    def told() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for sample in deep.of(model.Attention):
            fields = sample.tokens, sample.queries, sample.entries, sample.alive, sample.blocks, sample.pending
            found.setdefault(f"{sample.origin.model} {sample.layers}", []).append(fields)
        return found

    run(0)
    run(1)
    expected = told()
    threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told() == expected
    assert set(expected) == {"LlamaForCausalLM full", "Gemma3ForCausalLM full", "Gemma3ForCausalLM sliding"}


def test_cache_updates_are_timed_per_layer(deep: Any) -> None:
    """In a sampled pass every layer's Cache.update gives one duration, by kind of layer."""
    net = tiny.gemma3()
    tiny.greedy(net, tiny.prompt(12), 4)
    updates = deep.of(model.CacheUpdates)
    assert [(u.layers, len(u.durations_ns)) for u in updates[:2]] == [("sliding", 2), ("full", 1)]
    assert all(duration > 0 for update in updates for duration in update.durations_ns)


def test_layer_spans_lie_in_one_sampled_step_of_a_turn(watching: Callable[..., Any], tracer: Any, spans: Any) -> None:
    """A traced turn has one sampled step with a child per layer, inside the turn's time, in order."""
    watch = watching(tracer, deep=True)
    watch.bus.deep = True
    tiny.greedy(tiny.llama(), tiny.prompt(12), 8)
    (turn,) = tiny.named(spans, "text_completion LlamaForCausalLM")
    (step,) = tiny.named(spans, "sampled step")
    layers = [span for span in spans.get_finished_spans() if span.name.startswith("attention layer")]
    assert step.parent.span_id == turn.context.span_id
    assert [span.attributes["kvobs.layer"] for span in layers] == [0, 1, 2]
    assert all(span.parent.span_id == step.context.span_id for span in layers)
    assert all(turn.start_time <= span.start_time <= span.end_time <= turn.end_time for span in layers)
    assert all(span.attributes["kvobs.attention.implementation"] == "sdpa" for span in layers)
    assert all(span.attributes["kvobs.cache.update_s"] > 0 for span in layers)


def test_the_time_of_sampling_is_a_hooks_and_not_the_steps(deep: Any) -> None:
    """What a sampled pass spends on sampling is in the step's hook time."""
    net = tiny.llama()
    tiny.greedy(net, tiny.prompt(12), 8)
    events = deep.events()
    sampled = {event.t_ns: event.hook_ns for event in events if isinstance(event, model.Attention)}
    steps = [event for event in events if isinstance(event, model.Step) and event.t_ns in sampled]
    assert steps
    assert all(step.hook_ns >= sampled[step.t_ns] for step in steps)


def test_bursts_of_three_in_each_cycle(watching: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With an interval of 4, three steps of every twelve are sampled, running."""
    watch = watching(deep=True)
    watch.bus.deep = True
    from kvobs.sources.transformers._cadence import Cadence

    monkeypatch.setattr(Cadence, "took", lambda self, cost, step: setattr(self, "every", 4))
    tiny.greedy(tiny.llama(), tiny.prompt(12), 31)
    events = watch.events()
    sampled = {event.t_ns for event in events if isinstance(event, model.Attention)}
    decode_steps = [event.t_ns in sampled for event in events if isinstance(event, model.Step) and not event.prefill]
    assert decode_steps == [index % 12 < BURST for index in range(30)]


def test_uninstalling_restores_the_very_functions(watching: Callable[..., Any]) -> None:
    """After uninstalling, the interface and Cache.update are the objects they were."""
    interface, cache = transformers.modeling_utils.AttentionInterface, transformers.cache_utils.Cache
    before = vars(interface)["get_interface"], vars(cache)["update"]
    watch = watching(deep=True)
    assert vars(interface)["get_interface"] is not before[0]
    assert vars(cache)["update"] is not before[1]
    watch.close()
    assert (vars(interface)["get_interface"], vars(cache)["update"]) == before


def test_the_guard_takes_deep_sampling_away(deep: Any) -> None:
    """With ``bus.deep`` off no step is sampled, with it on again they are."""
    net = tiny.llama()
    deep.bus.deep = False
    tiny.greedy(net, tiny.prompt(12), 8)
    assert not deep.of(model.Attention, model.CacheUpdates)
    deep.bus.deep = True
    tiny.greedy(net, tiny.prompt(12), 8)
    assert deep.of(model.Attention)
