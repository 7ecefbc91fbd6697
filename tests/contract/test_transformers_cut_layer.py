"""A cut cache answers as the uncut one does with the cut positions masked, whatever is done with it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings it.")

from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.sources.transformers._actions_cut import version_refusal
from kvobs.sources.transformers._cut_layer import CutLayer, cut, plain_length
from tests.contract import tiny
from tests.contract.cut_scenes import Talk, sharp, standing

pytestmark = [pytest.mark.torch, pytest.mark.skipif(bool(version_refusal()), reason=version_refusal())]
CLOSE = 1e-5
MODELS = {implementation: sharp(layers=2) for implementation in ("eager", "sdpa")}
for _name, _model in MODELS.items():
    _model.set_attn_implementation(_name)


def some(talk: Talk, dropped: set[int]) -> None:
    """Cut keys out by their indices, all but the newest."""
    kept = [index for index in range(talk.physical()) if index not in dropped or index == talk.physical() - 1]
    cut(talk.cache.layers, torch.tensor(kept))
    talk.kept()


@settings(max_examples=12, deadline=None)
@given(implementation=st.sampled_from(["eager", "sdpa"]), padding=st.lists(st.integers(0, 6), min_size=1, max_size=3),
       turns=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.sets(st.integers(0, 60))), min_size=1,
                      max_size=5))
def test_any_positions(implementation: str, padding: list[int], turns: list[tuple[int, int, set[int]]]) -> None:
    """Whatever positions are cut between turns, in rows with or without padding, logits equal the masked twin's."""
    talk = Talk(MODELS[implementation], len(padding), padding)
    for length, new, dropped in [(12, 0, set()), *turns]:
        assert talk.say(length, new) < CLOSE
        some(talk, dropped)
        assert talk.cache.get_seq_length() == talk.whole.get_seq_length()
    assert talk.say(3, 1) < CLOSE


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_many_steps_and_turns(implementation: str) -> None:
    """Over four turns of 25 steps, with a cut in each, logits stay those of the masked twin: nothing accumulates."""
    talk = Talk(MODELS[implementation], 2)
    for turn in range(4):
        assert talk.say(20, 25) < CLOSE
        some(talk, {index for index in range(talk.physical()) if index % 5 == turn or 7 < index < 15})
    assert talk.say(5, 25) < CLOSE
    assert talk.physical() < talk.cache.get_seq_length() - 50


def test_the_twin_tells_cuts_apart() -> None:
    """The oracle can fail: without its mask, or with a shifted position, the logits differ by far more."""
    talk = Talk(MODELS["sdpa"])
    talk.say(30, 2)
    cut(talk.cache.layers, torch.arange(10, 32))
    assert talk.feed(tiny.prompt(1))[0] > 50 * CLOSE
    talk = Talk(MODELS["sdpa"])
    talk.say(30, 2)
    some(talk, set(range(10)))
    assert talk.feed(tiny.prompt(1), position_ids=torch.tensor([[22]]))[0] > 50 * CLOSE


@pytest.mark.parametrize("rows", [1, 2])
def test_generate(rows: int) -> None:
    """``generate`` is fed the whole dialogue over a cut cache, and gives the masked twin's greedy tokens."""
    talk = Talk(MODELS["sdpa"], rows)
    talk.say(40, 0)
    said = tiny.prompt(40, rows, 1)
    for turn in range(3):
        some(talk, {index for index in range(talk.physical()) if index % 3 == turn % 3})
        question = torch.cat([said, tiny.prompt(4, rows, 90 + turn)], 1)
        said = tiny.greedy(talk.model, question, 20, **{tiny.CACHE: copy.deepcopy(talk.cache)})
        ids, answer = question[:, len(talk.there):], []
        for _ in range(20):
            far, ids = talk.feed(ids)
            assert far < CLOSE
            answer.append(ids)
        assert torch.equal(torch.cat(answer, 1), said[:, -20:])


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_rearranged(data: st.DataObject) -> None:
    """Crops, reorders, repeats, selections, copies and pickles of a cut cache are those of its masked twin."""
    talk = Talk(MODELS["eager"], 2)
    talk.say(20, 2)
    for _ in range(data.draw(st.integers(1, 4), label="operations")):
        some(talk, data.draw(st.sets(st.integers(0, 40)), label="cut"))
        rows = talk.rows
        name = data.draw(st.sampled_from(["crop", "reorder", "repeat", "select", "copy", "pickle"]))
        order = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
        gone = data.draw(st.integers(1, 12), label="cropped")
        if name in ("copy", "pickle"):
            talk.cache = copy.deepcopy(talk.cache) if name == "copy" else pickle.loads(pickle.dumps(talk.cache))
        for cache in (talk.cache, talk.whole):
            if name == "crop":
                cache.crop(-gone)
            elif name == "reorder":
                cache.reorder_cache(order)
            elif name == "repeat" and rows < 8:
                cache.batch_repeat_interleave(2)
            elif name == "select":
                cache.batch_select_indices(order[:1])
        assert talk.cache.get_seq_length() == talk.whole.get_seq_length()
        talk.there = talk.there[:talk.whole.get_seq_length()]
        talk.rows = talk.whole.layers[0].keys.shape[0]
        talk.padding = torch.zeros(talk.rows, dtype=torch.int64)
        assert torch.equal(standing(talk.cache, talk.whole), talk.there.nonzero().flatten())
        assert talk.say(4, 2) < CLOSE


def test_crops_into_what_was_cut() -> None:
    """A crop to a length inside a hole, down to the first key and to nothing leaves what a plain cache would."""
    for length in (25, 12, 6, 1):
        talk = Talk(MODELS["sdpa"])
        talk.say(30, 0)
        some(talk, set(range(2, 5)) | set(range(8, 20)))
        for cache in (talk.cache, talk.whole):
            cache.crop(length - 30)
        assert talk.cache.get_seq_length() == length
        talk.there = talk.there[:length]
        assert talk.say(3, 3) < CLOSE
    assert plain_length(9, -9) == 0


def test_a_reset_cache_is_as_a_plain_one() -> None:
    """After a reset a cut cache has the length and holds what a plain one does after its reset."""
    talk = Talk(MODELS["sdpa"])
    talk.say(20, 0)
    cut(talk.cache.layers, torch.arange(5, 20))
    for cache in (talk.cache, talk.whole):
        cache.reset()
    assert talk.cache.get_seq_length() == talk.whole.get_seq_length()
    if not talk.whole.get_seq_length():
        with torch.no_grad():
            one, other = (talk.model(tiny.prompt(7), use_cache=True, **{tiny.CACHE: cache})[0]
                          for cache in (talk.cache, talk.whole))
        assert torch.equal(one, other)


def test_no_memory_for_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory runs out at some layer, no layer was cut: the cache is the one it was, to the bit."""
    talk = Talk(MODELS["sdpa"])
    talk.say(20, 0)
    before = [tensor for layer in talk.cache.layers for tensor in (layer.keys, layer.values)]
    select, calls = torch.Tensor.index_select, []

    def short(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return select(self, *args)

    monkeypatch.setattr(torch.Tensor, "index_select", short)
    with pytest.raises(torch.OutOfMemoryError):
        cut(talk.cache.layers, torch.arange(5, 20))
    monkeypatch.undo()
    after = [tensor for layer in talk.cache.layers for tensor in (layer.keys, layer.values)]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert not any(isinstance(layer, CutLayer) for layer in talk.cache.layers)
    assert talk.say(3, 2) < CLOSE


@pytest.fixture(scope="module")
def warm_dynamo() -> None:
    """Dynamo's first compilation patches nn.Module for good: not within a test, where it would look like ours."""
    torch.compile(torch.nn.Linear(1, 1), backend="eager")(torch.ones(1, 1))


def test_compiled(warm_dynamo: None) -> None:
    """A compiled model takes a cut cache in one graph without a break, padding and all."""
    if not hasattr(transformers.cache_utils, "KVSharingDict"):
        pytest.skip("Whether older versions of transformers compile in one graph is theirs to say.")
    talk = Talk(MODELS["sdpa"], 2, (5, 0))
    talk.say(30, 0)
    some(talk, set(range(8, 20)))
    plain, talk.model = talk.model, torch.compile(talk.model, backend="eager", fullgraph=True)
    assert talk.feed(tiny.prompt(3, 2))[0] < CLOSE
    talk.model = plain
    assert talk.say(3, 2) < CLOSE
