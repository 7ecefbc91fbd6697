"""Every way to call a model: same tokens with and without kvobs, one turn per call, exact sums."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

import kvobs
from kvobs import model as events
from tests.contract import tiny
from tests.contract.tiny import chat, same

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


class Tokens:
    """A tokenizer of 64 words, made in memory."""

    def __new__(cls) -> Any:
        tokenizers = pytest.importorskip("tokenizers")
        words = tokenizers.models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w2")
        backend = tokenizers.Tokenizer(words)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", padding_side="left")


# -- generate ------------------------------------------------------------------------------------------


def test_both_names_of_the_cache_argument_are_understood(watch: Any, llama: Any) -> None:
    """``past_key_values`` and, where it exists, ``cache`` name the cache whose session goes on."""
    for name in dict.fromkeys(["past_key_values", tiny.CACHE]):
        cache = transformers.DynamicCache(config=llama.config)
        ids = tiny.greedy(llama, tiny.prompt(5), 3, **{name: cache})
        tiny.greedy(llama, ids, 3, **{name: cache})
        first, second = watch.turns()
        assert (first.turn, second.turn, second.cached_tokens) == (1, 2, 7)
        assert first.cache_id == second.cache_id
        assert first.session == second.session


@pytest.mark.parametrize("more", [
    {}, {"do_sample": True, "temperature": 0.7, "top_k": 5}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True},
    {"do_sample": True, "num_return_sequences": 3}, {"num_beams": 4, "num_return_sequences": 2},
    {"cache_implementation": "static"}, {"use_cache": False}, {"repetition_penalty": 1.3},
    {"prompt_lookup_num_tokens": 2},
], ids=lambda more: "+".join(more) or "greedy")
def test_tokens_are_the_same_and_counted(watch: Any, llama: Any, more: dict[str, Any]) -> None:
    """Whatever the decoding method, the output is unchanged and the turn counts its prompt and its new tokens."""
    ids = tiny.prompt(10)
    result = same(watch, lambda: tiny.greedy(llama, ids, 7, **dict(more)))
    turn = watch.turn()
    assert (turn.outcome, turn.turn, turn.prompt_tokens) == ("ok", 1, 10)
    assert turn.new_tokens == result.shape[0] * (result.shape[1] - 10)
    assert 0 < turn.ttft_ns <= turn.t_ns - turn.start_ns
    assert turn.tpot_ns > 0


def test_a_chunked_prefill_is_all_prefill(watch: Any, llama: Any) -> None:
    """A prompt of 10 in chunks of 4 takes 3 prefill passes; the rest decode; the copies follow the same series."""
    expected = tiny.greedy(llama, tiny.prompt(10), 5)
    watch.events()
    cache = transformers.DynamicCache(config=llama.config)
    output = tiny.greedy(llama, tiny.prompt(10), 5, prefill_chunk_size=4, **{tiny.CACHE: cache})
    assert torch.equal(output, expected)
    seen = watch.events()
    steps = [e for e in seen if isinstance(e, events.Step)]
    (turn,) = [e for e in seen if isinstance(e, events.Turn)]
    assert [(step.prefill, step.tokens) for step in steps] == [(True, 4), (True, 4), (True, 2)] + [(False, 1)] * 4
    assert turn.reallocations == 2 * 3 * 7
    assert turn.bytes_written == 14 * tiny.row_bytes(llama)
    assert turn.bytes_copied == tiny.row_bytes(llama) * (4 + 8 + 10 + 11 + 12 + 13)


def test_steps_sum_to_their_turn(watch: Any, llama: Any) -> None:
    """What steps and rewrites report adds up to the turn, and the last step's state is the turn's."""
    tiny.greedy(llama, tiny.prompt(6, 2), 5, num_beams=2)
    seen = watch.events()
    (turn,) = [e for e in seen if isinstance(e, events.Turn)]
    parts = [e for e in seen if isinstance(e, events.Step | events.Rewrite)]
    steps = [e for e in parts if isinstance(e, events.Step)]
    assert len(steps) == turn.steps == 5
    assert sum(e.reallocations for e in parts) == turn.reallocations
    assert sum(e.bytes_copied for e in parts) == turn.bytes_copied
    assert sum(e.bytes_written for e in steps) == turn.bytes_written
    assert all(e.duration_ns > 0 and e.hook_ns > 0 for e in steps)
    assert (steps[-1].kv_bytes, steps[-1].kv_reserved_bytes) == (turn.kv_bytes, turn.kv_reserved_bytes)


def test_embeddings_instead_of_ids(watch: Any, llama: Any) -> None:
    """With ``inputs_embeds`` the prompt is as long as the embeddings; only new tokens come back."""
    embeds = llama.get_input_embeddings()(tiny.prompt(9)).detach()
    same(watch, lambda: llama.generate(inputs_embeds=embeds, max_new_tokens=4, do_sample=False))
    turn = watch.turn()
    assert (turn.prompt_tokens, turn.new_tokens, turn.steps) == (9, 4, 4)
    assert turn.kv_bytes == 12 * tiny.row_bytes(llama)


def test_padding_is_not_counted_as_tokens(watch: Any, llama: Any) -> None:
    """In a batch, left padding is no prompt, and what follows a row's end token is no reply."""
    ids, mask = tiny.prompt(8, 3), torch.ones(3, 8, dtype=torch.long)
    mask[0, :5], mask[2, :1] = 0, 0
    ids = ids * mask
    plain = tiny.greedy(llama, ids, 12, attention_mask=mask)
    end = int(plain[1, 8 + 3])
    output = same(watch, lambda: tiny.greedy(llama, ids, 12, attention_mask=mask, eos_token_id=end))
    turn = watch.turn()
    replies = [row[8:].tolist() for row in output]
    expected = sum(row.index(end) + 1 if end in row else len(row) for row in replies)
    assert turn.prompt_tokens == 24 - 6
    assert turn.new_tokens == expected
    assert turn.kv_bytes == (output.shape[1] - 1) * tiny.row_bytes(llama, 3)


def test_an_assistant_is_a_session_of_its_own(watch: Any, llama: Any) -> None:
    """Assisted generation: the assistant's calls are turns below the call's session, the call itself is one turn."""
    assistant = tiny.llama(layers=1, seed=3)
    assistant.generation_config.num_assistant_tokens = 3
    ids = tiny.prompt(6)
    with kvobs.session("anna", priority="critical"):
        output = same(watch, lambda: tiny.greedy(llama, ids, 8, assistant_model=assistant))
    turns = watch.turns()
    (main,) = [turn for turn in turns if turn.session == "anna"]
    helpers = [turn for turn in turns if turn is not main]
    assert {turn.session for turn in helpers} == {"anna/assistant"}
    assert {turn.priority for turn in turns} == {"critical"}
    assert (main.new_tokens, main.prompt_tokens) == (8, 6)
    assert main.kv_bytes <= (output.shape[1] + 3) * tiny.row_bytes(llama)
    assert main.reallocations >= 6 * main.steps
    assert len(helpers) >= 1


@pytest.mark.parametrize("kind", ["TextStreamer", "TextIteratorStreamer"])
def test_streaming_in_a_thread(watch: Any, llama: Any, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A streamed call in another thread streams the same text and is one turn of that thread's session."""
    tokenizer, ids = Tokens(), tiny.prompt(5)
    expected = tiny.greedy(llama, ids, 6)
    watch.events()
    streamer = getattr(transformers, kind)(tokenizer)

    def work() -> None:
        with kvobs.session("streamed"):
            tiny.greedy(llama, ids, 6, streamer=streamer)

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer) if kind == "TextIteratorStreamer" else ""
    thread.join()
    text = text or capsys.readouterr().out
    assert text.split() == tokenizer.decode(expected[0]).split()
    turn = watch.turn()
    assert (turn.session, turn.new_tokens, turn.outcome) == ("streamed", 6, "ok")


def test_a_pipeline(watch: Any, llama: Any) -> None:
    """``pipeline("text-generation")`` is observed like the call it makes."""
    pipe = transformers.pipeline("text-generation", model=llama, tokenizer=Tokens())
    watch.events()
    text = pipe("w5 w6 w7", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    turn = watch.turn()
    assert (turn.prompt_tokens, turn.new_tokens, turn.steps) == (3, 4, 4)
    assert text.count("w") == 7


# -- bare forward passes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"return_dict": False}], ids=["dict", "tuple"])
def test_a_bare_loop_is_divided_at_each_prefill(watch: Any, llama: Any, more: dict[str, Any]) -> None:
    """A pass over several tokens after single ones begins the next turn; the open one closes when its cache is gone."""
    cache = transformers.DynamicCache(config=llama.config)
    chat(llama, cache, 5, 4, **more)
    assert watch.turns() == []
    chat(llama, cache, 3, 4, seed=2, **more)
    first = watch.turn()
    del cache
    second = watch.turn()
    row = tiny.row_bytes(llama)
    assert [(t.turn, t.steps, t.prompt_tokens, t.cached_tokens, t.new_tokens) for t in (first, second)] == [
        (1, 4, 5, 0, 3), (2, 4, 11, 8, 3)]
    assert (first.kv_bytes, second.kv_bytes) == (8 * row, 14 * row)
    assert second.bytes_copied == row * (8 + 11 + 12 + 13)
    assert first.session == second.session
    assert first.t_ns <= second.start_ns


def test_a_cache_that_a_bare_pass_makes_is_followed(watch: Any, llama: Any) -> None:
    """Without a cache argument the model makes one: the pass that made it wrote and re-allocated everything."""
    with torch.no_grad():
        output = llama(input_ids=tiny.prompt(5))
    (step,) = watch.of(events.Step)
    row = tiny.row_bytes(llama)
    assert (step.bytes_written, step.bytes_copied, step.reallocations) == (5 * row, 0, 6)
    assert step.prefill
    del output
    assert watch.turn().kv_bytes == 5 * row


def test_a_positional_cache_keeps_its_past(watch: Any, llama: Any) -> None:
    """A cache given by position was there before the pass: what it held is copied, not written."""
    cache = transformers.DynamicCache(config=llama.config)
    chat(llama, cache, 4, 1)
    watch.source._caches.clear()
    watch.events()
    with torch.no_grad():
        llama(tiny.prompt(2), None, None, cache)
    (step,) = watch.of(events.Step)
    row = tiny.row_bytes(llama)
    assert (step.bytes_written, step.bytes_copied) == (2 * row, 4 * row)


def test_an_idle_bare_turn_is_closed_after_five_seconds(watch: Any, llama: Any) -> None:
    """The cache lives on, but the turn ended with its last pass."""
    cache = transformers.DynamicCache(config=llama.config)
    chat(llama, cache, 5, 3)
    last = watch.of(events.Step)[-1].t_ns
    watch.source.sample(last + 4_900_000_000)
    assert watch.turns() == []
    watch.source.sample(last + 5_100_000_000)
    turn = watch.turn()
    assert (turn.t_ns, turn.new_tokens) == (last, 2)
    chat(llama, cache, 1, 1)
    watch.source.sample(last + 60_000_000_000)
    assert watch.turn().turn == 2


def test_a_cache_freed_is_said_once(watch: Any, llama: Any) -> None:
    """Each followed cache reports its end, after its last step."""
    for _ in range(3):
        tiny.greedy(llama, tiny.prompt(4), 2)
    seen = watch.events()
    gone = [e.cache_id for e in seen if isinstance(e, events.CacheGone)]
    assert len(gone) == len(set(gone)) == 3
    assert set(gone) == {e.cache_id for e in seen if isinstance(e, events.Step)}


def test_a_model_without_a_cache_is_no_turn(watch: Any) -> None:
    """An encoder keeps no KV cache: nothing is reported about it."""
    config = transformers.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                     intermediate_size=32)
    with torch.no_grad():
        transformers.BertModel(config).eval()(input_ids=tiny.prompt(5))
    assert watch.events() == []
