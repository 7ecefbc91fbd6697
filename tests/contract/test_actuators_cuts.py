"""Cutting Pending-Evict tokens by order: what goes, what it leaves, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings it.")

from kvobs import model
from kvobs.sources.transformers._actions_cut import NO_CACHES, NOTHING, UNSEEN
from kvobs.testing import ActuatorContract, Rig
from tests.contract import tiny
from tests.contract.actuators import Caches, caches
from tests.contract.cut_scenes import Talk, cutting, sharp

pytestmark = pytest.mark.torch
KIND = "cut_pending_evict"
CLOSE = 1e-5
BLOCK, QUIET, STEPS = 16, 0.08, 3


@pytest.fixture
def engine() -> Iterator[Caches]:
    from transformers.modeling_utils import AttentionInterface

    if not hasattr(AttentionInterface, "get_interface"):
        pytest.skip("transformers 5.0 has no place where attention could be looked at, so that nothing is cut there.")
    with cutting() as found:
        yield found


class TestCuts(ActuatorContract):
    """Two sessions, both of which have blocks that are Pending Evict."""

    acts = ("chunked_growth", "compact", KIND)

    @contextmanager
    def rig(self) -> Iterator[Rig]:
        with cutting() as found:
            if found.watch.source._deep._missing:
                pytest.skip("transformers 5.0 has no place where attention could be looked at.")
            kept = [found.session(70, 6, 1), found.session(40, 5, 2, rows=2)]
            found.answers()
            yield Rig(found.point, found.reach, found.answers, lambda: found.state(*kept))


def blocks_by_the_article(twin: Any, ids: Any) -> list[bool]:
    """Pending Evict, block by block, after single steps over ``ids``: written from the article, on eager weights."""
    cache, runs, pending = transformers.DynamicCache(config=twin.config), None, None
    for step in ids.split([ids.shape[1] - 12] + [1] * 12, 1):
        with torch.no_grad():
            weights = twin(step, use_cache=True, output_attentions=True, **{tiny.CACHE: cache}).attentions
        if step.shape[1] > 1:
            continue
        found = [[[float(layer[row, :, 0, first:first + BLOCK].max()) for first in range(0, layer.shape[3], BLOCK)]
                  for row in range(layer.shape[0])] for layer in weights]
        flat = [score for layer in found for row in layer for score in row]
        if runs is None or len(runs) != len(flat):
            assert runs is None, "A block began: choose other lengths."
            runs, pending = [0] * len(flat), [False] * len(flat)
        runs = [run + 1 if score < QUIET else 0 for run, score in zip(runs, flat, strict=True)]
        pending = [score < QUIET and (run >= STEPS or before)
                   for score, run, before in zip(flat, runs, pending, strict=True)]
    blocks = len(found[0][0])
    return [all(pending[place] for place in range(block, len(pending), blocks)) for block in range(blocks)]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_goes_is_what_the_article_says(engine: Caches, implementation: str, rows: int) -> None:
    """Just the blocks go whose largest weight was below 0.08 in three steps running, in each layer and row."""
    told = set()
    for factor in (40.0, 60.0, 80.0):
        chat = sharp(factor)
        chat.set_attn_implementation(implementation)
        eager = copy.deepcopy(chat)
        eager.set_attn_implementation("eager")
        engine.model, ids, cache = chat, tiny.prompt(125, rows, 5), transformers.DynamicCache(config=chat.config)
        for step in ids.split([113] + [1] * 12, 1):
            with torch.no_grad():
                chat(step, use_cache=True, **{tiny.CACHE: cache})
        engine.watch.bus.active = False
        pending = blocks_by_the_article(eager, ids)
        engine.watch.bus.active = True
        before = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        old = cache.layers[0].keys
        taken = engine.order(KIND)
        kept = [slot for slot in range(125) if not pending[slot // BLOCK] or slot // BLOCK == 124 // BLOCK]
        assert taken.done
        assert torch.equal(cache.layers[0].keys, old[:, :, kept])
        after = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert taken.bytes == before - after == (125 - len(kept)) * tiny.row_bytes(chat, rows)
        assert (f"{125 - len(kept)} token positions" in taken.reason) == (len(kept) < 125)
        told.add(len(kept))
        assert engine.order(KIND).bytes == 0
        del cache
    assert len(told) > 1, "Every cache kept as much: nothing was told apart."


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("rows", "padding"), [(1, ()), (2, ()), (3, (0, 7, 19))])
def test_logits_are_those_of_the_masked_cache(engine: Caches, implementation: str, rows: int,
                                              padding: tuple[int, ...]) -> None:
    """Over three turns of 22 steps with two orders in each, logits equal those of the masked, uncut cache to 1e-5."""
    engine.model = sharp(30.0)
    engine.model.set_attn_implementation(implementation)
    talk, lengths = Talk(engine.model, rows, padding), []
    for _ in range(3):
        for length, new in ((30, 12), (1, 9)):
            assert talk.say(length, new) < CLOSE
            assert engine.order(KIND).done
            talk.kept()
            lengths.append(talk.cache.get_seq_length() - talk.physical())
            assert talk.cache.get_seq_length() == talk.whole.get_seq_length() == len(talk.there)
    assert talk.say(3, 5) < CLOSE
    assert len(set(lengths)) > 2, lengths


def test_orders_within_generate(engine: Caches) -> None:
    """A cut in the middle of a generate call leaves positions as they are: steps go on at the next one."""
    model_, cache = engine.model, transformers.DynamicCache(config=engine.model.config)
    seen: list[tuple[int, int]] = []

    def each(ids: Any, scores: Any) -> Any:
        seen.append((cache.get_seq_length(), cache.layers[0].keys.shape[2]))
        if len(seen) in (10, 30):
            engine.submit(KIND)
        return scores

    out = tiny.greedy(model_, tiny.prompt(40), 50, logits_processor=[each], **{tiny.CACHE: cache})
    assert [length for length, _ in seen] == list(range(40, 90))
    assert seen[9][1] > seen[10][1] or seen[10][1] > seen[11][1]
    assert out.shape[1] == 90
    engine.reach()
    assert [taken.done for taken in engine.answers()] == [True, True]


def test_the_ledger(engine: Caches) -> None:
    """After a cut steps tell the bytes that are there, and turns the tokens that the dialogue has."""
    cache, row = engine.session(60, 6), tiny.row_bytes(engine.model)
    engine.watch.events()
    taken = engine.order(KIND)
    engine.submit("compact")
    with torch.no_grad():
        engine.model(tiny.prompt(4), use_cache=True, **{tiny.CACHE: cache})
    step, = (step for step in engine.watch.of(model.Step) if step.cache_id)
    slots = cache.layers[0].keys.shape[2]
    assert slots == 69 - 64
    assert taken.bytes == 64 * row
    assert (step.kv_bytes, step.bytes_written, step.bytes_copied) == (slots * row, 4 * row, (slots - 4) * row)
    tiny.greedy(engine.model, tiny.prompt(80), 3, **{tiny.CACHE: cache})
    turn = engine.watch.turns()[-1]
    assert (turn.prompt_tokens, turn.cached_tokens, turn.new_tokens) == (80, 69, 3)


def test_other_actions_on_a_cut_cache(engine: Caches) -> None:
    """A cut cache grows in chunks, is compacted and goes on when kvobs is gone; logits stay the masked twin's."""
    talk = Talk(engine.model, 2)
    talk.say(60, 6)
    assert engine.order(KIND).bytes
    talk.kept()
    for kind, undo in (("chunked_growth", False), ("compact", False), ("chunked_growth", True)):
        assert engine.order(kind, undo=undo).done
        assert talk.say(5, 6) < CLOSE
    from transformers.cache_utils import DynamicLayer

    patched = dict(vars(DynamicLayer))
    engine.watch.close()
    assert dict(vars(DynamicLayer)) == patched
    talk.cache = copy.deepcopy(talk.cache)
    assert talk.say(5, 6) < CLOSE
    assert talk.physical() == talk.cache.get_seq_length() - 64


def test_masks_of_four_dimensions(engine: Caches) -> None:
    """A caller's 4-D mask over the logical length loses the columns that are not there."""
    talk = Talk(engine.model)
    talk.say(60, 6)
    assert engine.order(KIND).bytes
    talk.kept()
    mask = torch.full((1, 1, 2, 68), 0.0)
    mask[..., 0, 67] = torch.finfo(torch.float32).min
    assert talk.feed(tiny.prompt(2), attention_mask=mask)[0] < CLOSE


def test_off_unless_configured() -> None:
    """Without the setting there is no such action."""
    with caches() as engine:
        assert KIND not in {one.kind for one in engine.point.capabilities()}
        with pytest.raises(ValueError, match=KIND):
            engine.point.plan(KIND)
    with cutting() as engine:
        assert KIND in {one.kind for one in engine.point.capabilities()}
        assert engine.order(KIND).reason == NO_CACHES


def _used(engine: Caches, cache: Any, chat: Any = None, **more: Any) -> Any:
    engine.model = chat if chat is not None else engine.model
    tiny.greedy(engine.model, tiny.prompt(40), 6, **{tiny.CACHE: cache}, **more)
    return cache


def _mistral(engine: Caches) -> Any:
    chat = tiny.mistral()
    return _used(engine, transformers.DynamicCache(), chat)


def _gradients(engine: Caches) -> Any:
    cache = engine.session(40, 6)
    engine.model(tiny.prompt(1), use_cache=True, **{tiny.CACHE: cache})
    return cache


def _four(engine: Caches) -> Any:
    cache = engine.session(40, 6)
    with torch.no_grad():
        engine.model(tiny.prompt(1), use_cache=True, attention_mask=torch.zeros(1, 1, 1, 46), **{tiny.CACHE: cache})
    return cache


def _unlike(engine: Caches) -> Any:
    cache = engine.session(40, 6)
    cache.layers[1].crop(-2)
    return cache


def _renamed(engine: Caches) -> Any:
    class Own(type(engine.model)):  # type: ignore[misc]
        """Somebody's own model."""

    engine.model.__class__ = Own
    return engine.session(40, 6)


def _alibi(engine: Caches) -> Any:
    config = transformers.BloomConfig(vocab_size=tiny.VOCAB, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)
    return _used(engine, transformers.DynamicCache(config=config), tiny.build(config))


def _flash(engine: Caches) -> Any:
    cache = engine.session(40, 6)
    engine.model.config._attn_implementation = "flash_attention_2"
    return cache


REFUSED: dict[str, tuple[Callable[[Caches], Any], str]] = {
    "static": (lambda engine: _used(engine, transformers.StaticCache(config=engine.model.config, max_cache_len=64)),
               "A StaticCache is not cut"),
    "sliding": (lambda engine: _used(engine, transformers.DynamicCache(config=tiny.gemma3().config), tiny.gemma3()),
                "layers of DynamicSlidingWindowLayer"),
    "sliding model": (_mistral, "not all of its layers attend to every token"),
    "gradients": (_gradients, "gradients flow"),
    "mask": (_four, "a mask that is not 2-D"),
    "unlike": (_unlike, "different numbers of tokens"),
    "own model": (_renamed, "make masks in a way that is not known"),
    "alibi": (_alibi, "since ALiBi takes distances"),
    "flash": (_flash, "under the attention flash_attention_2"),
    "unsampled": (lambda engine: engine.session(40, 1), UNSEEN),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(engine: Caches, case: str) -> None:
    """What is not sound to cut is refused with a sentence, and is left as it is; the plan says the same."""
    make, words = REFUSED[case]
    cache = make(engine)
    before = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    effect, used, engine.model = engine.point.plan(KIND), engine.model, tiny.llama()
    taken = engine.order(KIND)
    assert not taken.done
    assert words in taken.reason
    assert taken.reason == effect.reason
    assert effect.bytes is None
    assert used is not None  # it is alive, since what is told of a model that is gone is another thing
    after = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_encoder_decoders_and_gone_models(engine: Caches) -> None:
    """Encoder-decoders are refused, and a cache that outlives its model."""
    out = tiny.greedy(tiny.t5(), tiny.prompt(40), 6, return_dict_in_generate=True)
    assert "EncoderDecoderCache is not cut" in engine.order(KIND).reason
    del out
    kept, engine.model = engine.session(40, 6), tiny.llama(seed=3)
    del kept
    cache = engine.session(40, 6)
    engine.model = None
    import gc

    gc.collect()
    assert "or is gone" in engine.point.plan(KIND).reason
    assert cache.get_seq_length() == 45


def test_what_was_rearranged_is_not_cut(engine: Caches) -> None:
    """After a crop nothing is known of a cache's blocks, and nothing goes until steps have told again."""
    cache = engine.session(70, 6)
    assert engine.point.plan(KIND).bytes == 64 * tiny.row_bytes(engine.model)
    cache.crop(-3)
    assert engine.point.plan(KIND).reason == NOTHING
    taken = engine.order(KIND)
    assert (taken.done, taken.bytes, taken.reason) == (True, 0, NOTHING)
    tiny.chat(engine.model, cache, 1, 4)
    assert engine.order(KIND).bytes == 64 * tiny.row_bytes(engine.model)
