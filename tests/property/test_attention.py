"""The measurement of attention against plain loops over numbers, on tensors of any shape and mask."""

from __future__ import annotations

import math
import random
import weakref
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")

from kvobs.sources.transformers import _attention
from kvobs.sources.transformers._attention import AttentionProbe
from kvobs.sources.transformers._lifecycle import LifeCycle
from tests.contract.attention_reference import Reference, Sums, entries

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 140))


def weights_of(query: list[list[float]], keys: list[list[list[float]]], valid: list[bool], scaling: float, *,
               softcap: float | None = None, sinks: list[float] | None = None,
               bias: list[list[float]] | None = None) -> list[list[float]]:
    """Attention weights of each query head by the definition of softmax."""
    group = len(query) // len(keys)
    found = []
    for head, vector in enumerate(query):
        logits = [scaling * sum(a * b for a, b in zip(vector, key, strict=True)) for key in keys[head // group]]
        if softcap is not None:
            logits = [softcap * math.tanh(logit / softcap) for logit in logits]
        if bias is not None:
            logits = [logit + more for logit, more in zip(logits, bias[head], strict=True)]
        powers = [math.exp(logit) if there else 0.0 for logit, there in zip(logits, valid, strict=True)]
        total = sum(powers) + (math.exp(sinks[head]) if sinks is not None else 0.0)
        found.append([power / total for power in powers])
    return found


def agree(found: Any, expected: Sums) -> None:
    """Every field of a sample, to 1e-4."""
    for name, value in asdict(expected).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4, abs=1e-4), name


def mask_of(form: str, there: Any) -> Any:
    """``there`` [rows, length] in one of the forms in which transformers hands masks over."""
    if form == "additive":
        return torch.zeros(there.shape)[:, None, None].masked_fill(~there[:, None, None], torch.finfo().min)
    return {"none": None, "bool": there[:, None, None], "padding": there.long()}[form]


FORMS = st.sampled_from(["none", "bool", "additive", "padding"])


@settings(max_examples=60)
@given(SHAPES, st.integers(0, 2**31), FORMS, st.sampled_from([None, 2.0]), st.booleans(), st.booleans(),
       st.sampled_from([None, 8, 40]), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_probe_equals_plain_loops(shape: tuple[int, int, int, int], seed: int, form: str, softcap: float | None,
                                    with_sinks: bool, with_bias: bool, window: int | None, kind: Any) -> None:
    """Groups of heads, holes and padding in any form of mask, windows, soft caps, learnable sinks, biases, halves.

    Of halves the oracle takes the rounded values, which on a CPU are multiplied exactly.
    """
    rows, kv_heads, group, length = shape
    generator = torch.Generator().manual_seed(seed)
    query = (2 * torch.randn(rows, kv_heads * group, 1, 4, generator=generator)).to(kind)
    key = torch.randn(rows, kv_heads, length, 4, generator=generator).to(kind)
    there = torch.rand(rows, length, generator=generator) < 0.7
    there[:, -1] = True
    sinks = torch.randn(kv_heads * group, generator=generator) if with_sinks else None
    bias = torch.randn(rows, kv_heads * group, 1, length, generator=generator) if with_bias else None
    probe = AttentionProbe()
    probe.begin(length, True)
    probe.layer(0, "full", query, key, mask_of(form, there), token_bytes=32, scaling=0.5, softcap=softcap, sinks=sinks,
                bias=bias, window=window)
    found = probe.end()
    assert found is not None
    sums, reference = Sums(), Reference(32)
    for row in range(rows):
        valid = [(form == "none" or bool(there[row, j])) and (window is None or length - 1 - j < window)
                 for j in range(length)]
        vectors, keys = query[row, :, 0].tolist(), key[row].tolist()
        weights = weights_of(vectors, keys, valid, 0.5, softcap=softcap,
                             sinks=sinks.tolist() if sinks is not None else None,
                             bias=bias[row, :, 0].tolist() if bias is not None else None)
        reference.row(sums, 0, row, weights, valid, length)
        entries(sums, vectors, keys, valid)
    agree(found["full"], sums)


@settings(max_examples=40)
@given(st.integers(0, 2**31), FORMS, st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 3),
       st.integers(1, 60), st.integers(20, 70), st.sampled_from([1, 100, 1 << 18]), st.sampled_from([1, 1000, 1 << 22]))
def test_steps_of_two_kinds_of_layers_equal_plain_loops(seed: int, form: str, steps: list[bool], rows: int, start: int,
                                                        window: int, held: int, together: int) -> None:
    """Over steps with gaps, full and rolling layers with padding each have their own sums and states, however many
    layers and rows are looked at together."""
    generator = torch.Generator().manual_seed(seed)
    full, rolled = Reference(16), Reference(24)
    probe, dim, total = AttentionProbe(), 2, start + len(steps)
    keys = torch.randn(3, rows, 1, total, dim, generator=generator)
    there = torch.rand(3, rows, total, generator=generator) < 0.8
    there[..., start - 1:] = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention, "_HELD", held)
        patch.setattr(_attention, "_SLICE", together)
        for step, consecutive in enumerate(steps):
            seen, sums = start + step + 1, {"full": Sums(), "sliding": Sums()}
            probe.begin(seen, consecutive)
            for layer in range(3):
                kind, reference = ("sliding", rolled) if layer == 1 else ("full", full)
                length = min(seen, window) if layer == 1 else seen
                query = 4 * torch.randn(rows, 2, 1, dim, generator=generator)
                key, where = keys[layer, :, :, seen - length:seen], there[layer, :, seen - length:seen]
                # A mask of its own for every layer, as of models that make them anew in each, and choose in each.
                probe.layer(layer, kind, query, key, mask_of(form, where.clone()), scaling=1.0,
                            token_bytes=reference.token_bytes)
                for row in range(rows):
                    valid = [form == "none" or bool(one) for one in where[row]]
                    vectors, vector_keys = query[row, :, 0].tolist(), key[row].tolist()
                    reference.row(sums[kind], layer, row, weights_of(vectors, vector_keys, valid, 1.0), valid, seen,
                                  consecutive=consecutive)
                    entries(sums[kind], vectors, vector_keys, valid)
            found = probe.end()
            assert found is not None
            assert set(found) == set(sums)
            for kind, expected in sums.items():
                agree(found[kind], expected)


@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=1, max_size=25), st.integers(1, 60), st.integers(1, 70),
       st.booleans(), st.integers(1, 2), st.integers(1, 2))
def test_the_life_cycle_equals_a_plain_state_machine(seed: int, steps: list[bool], start: int, window: int,
                                                     holes: bool, layers: int, rows: int) -> None:
    """Over growing and rolling windows, gaps, holes and scores on the threshold, every count equals the machine's."""
    chance = random.Random(seed)
    cycle, reference = LifeCycle(), Reference(5)
    there = [[not holes or chance.random() < 0.7 for _ in range(start + len(steps))] for _ in range(rows)]
    for step, consecutive in enumerate(steps):
        seen, sums = start + step, Sums()
        length = min(seen, window)
        valid = [row[seen - length:seen] for row in there]
        # Most tokens are quiet, so that runs of three quiet steps and their ends are both common.
        scores = [[[chance.choice([0.001, 0.05, 0.08, 0.2]) if chance.random() < 0.02 else 0.01
                    for _ in range(length)] for _ in range(rows)] for _ in range(layers)]
        for layer in range(layers):
            for row in range(rows):
                reference.row(sums, layer, row, [scores[layer][row]], valid[row], seen, consecutive=consecutive)
        found = cycle.step("x", torch.tensor(scores, dtype=torch.float64), torch.tensor(valid) if holes else None,
                           max(0, seen - length), 5, consecutive=consecutive)
        assert [int(number) for number in found] == [
            sums.blocks, sums.pending, sums.to_pending, sums.to_active, sums.reclaimable_bytes]


@pytest.mark.parametrize(("slope", "share"), [(0.0, 0.388), (0.0359, 0.92), (0.0151, 0.71), (0.0134, 0.68)])
def test_the_chance_line_and_the_article_s_figures(slope: float, share: float) -> None:
    """Over 512 queries and a window of 64 uniform attention is local by 0.388, decays by the article's shares."""
    probe = AttentionProbe(window=64, sinks=0)
    local = chance = queries = 0.0
    for position in range(512):
        probe.begin(position + 1, True)
        key = (slope * torch.arange(position + 1.0)).reshape(1, 1, -1, 1)
        probe.layer(0, "full", torch.ones(1, 1, 1, 1), key, None, token_bytes=8, scaling=1.0)
        found = probe.end()
        assert found is not None
        local, chance, queries = (local + found["full"].local_sum, chance + found["full"].chance_sum,
                                  queries + found["full"].queries)
    assert queries == 512
    assert round(local / queries, 3 if slope == 0 else 2) == share
    assert round(chance / queries, 3) == 0.388


def test_rows_of_nothing_but_padding_count_for_nothing() -> None:
    """A row whose keys are all masked adds nothing, and the sums of the other row stay numbers."""
    generator = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 2, 1, 4, generator=generator), torch.randn(2, 1, 20, 4, generator=generator)
    there = torch.tensor([[True] * 20, [False] * 20])
    for form in ("bool", "additive", "padding"):
        mask = mask_of(form, there)
        both, one = AttentionProbe(), AttentionProbe()
        both.begin(20, True)
        both.layer(0, "full", query, key, mask, token_bytes=1, scaling=0.5)
        one.begin(20, True)
        one.layer(0, "full", query[:1], key[:1], None, token_bytes=1, scaling=0.5)
        found, expected = both.end(), one.end()
        assert found is not None
        assert expected is not None
        assert found["full"] == pytest.approx(expected["full"])


def test_logits_that_are_no_numbers_are_no_sample() -> None:
    """A kind of layers whose keys hold NaN has no sums that would spoil a counter for good; the other kind has."""
    query, key = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 20, 4)
    probe = AttentionProbe()
    probe.begin(20, True)
    probe.layer(0, "full", query, key * math.nan, None, token_bytes=1, scaling=0.5)
    probe.layer(1, "sliding", query, key, None, token_bytes=1, scaling=0.5)
    assert set(probe.end() or {}) == {"sliding"}


class Pinned:
    """Stands for the copy on the host and the event behind it of a device whose values cannot be read."""

    def __init__(self) -> None:
        self.done, self.copies = False, list[tuple[int, ...]]()

    def query(self) -> bool:
        return self.done

    def to_host(self, numbers: Any) -> tuple[Any, Any]:
        self.copies.append(tuple(numbers.shape))
        return torch.arange(float(numbers.numel())) + 100 * len(self.copies), self


@pytest.mark.parametrize("form", ["none", "bool", "additive", "padding"])
def test_on_a_device_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """On a device without values no operation asks for one, and a step's numbers come when its event has passed."""
    pinned = Pinned()
    monkeypatch.setattr(_attention, "_to_host", pinned.to_host)
    probe = AttentionProbe()

    def step() -> Any:
        probe.begin(20, True)
        mask = mask_of(form, torch.ones(2, 20, dtype=torch.bool))
        mask = mask if mask is None else mask.to("meta")
        for layer in range(3):
            probe.layer(layer, "full", torch.empty(2, 4, 1, 8, device="meta"), torch.empty(2, 2, 20, 8, device="meta"),
                        mask, token_bytes=1, scaling=0.5, sinks=torch.empty(4, device="meta"), softcap=3.0)
        return probe.end()

    assert step() is None
    assert step() is None  # the first one's event has not passed: this one is let go
    assert len(pinned.copies) == 1
    pinned.done = True
    first = step()
    assert first["full"].reclaimable_bytes == 100 + pinned.copies[0][0] - 1
    if form == "none":  # what follows from shapes needs no device
        assert (first["full"].tokens, first["full"].queries, first["full"].entries) == (20, 2 * 4 * 3, 20 * 2 * 2 * 3)
    assert step()["full"].reclaimable_bytes == 200 + pinned.copies[1][0] - 1


def test_nothing_that_was_shown_is_changed_or_kept() -> None:
    """Inputs and the random state are as they were, also under autocast and inference mode; inputs die with their
    owner, and what is measured under autocast is what is measured without."""
    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 200, 8)
    plain = AttentionProbe()
    plain.begin(200, True)
    plain.layer(0, "full", query, key, None, token_bytes=1, scaling=0.3)
    expected = plain.end()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        copies, state = (query.clone(), key.clone()), torch.random.get_rng_state()
        probe = AttentionProbe()
        probe.begin(200, True)
        probe.layer(0, "full", query, key, None, token_bytes=1, scaling=0.3)
        assert probe.end() == expected
        assert torch.equal(torch.random.get_rng_state(), state)
        assert torch.equal(query, copies[0])
        assert torch.equal(key, copies[1])
    gone = weakref.ref(key)
    del key
    assert gone() is None


@pytest.mark.parametrize("form", ["bool", "additive", "padding"])
def test_a_mask_lives_as_long_as_the_step(form: str) -> None:
    """A mask is held until its step ends, lest another one of a later layer takes its address, and not longer."""
    probe = AttentionProbe()
    probe.begin(20, True)
    mask = mask_of(form, torch.ones(1, 20, dtype=torch.bool))
    probe.layer(0, "full", torch.ones(1, 1, 1, 4), torch.ones(1, 1, 20, 4), mask, token_bytes=1, scaling=0.5)
    held = weakref.ref(mask)
    del mask
    assert held() is not None
    probe.end()
    assert held() is None
