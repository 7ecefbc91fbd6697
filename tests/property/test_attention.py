"""The measurement of attention against plain loops over numbers, on tensors of any shape and mask."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")

from kvobs.sources.transformers._attention import AttentionProbe
from kvobs.sources.transformers._lifecycle import LifeCycle
from tests.contract.attention_reference import Reference, Sums, entries

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 90))


def weights_of(query: list[list[float]], keys: list[list[list[float]]], valid: list[bool], scaling: float,
               softcap: float | None, sinks: list[float] | None) -> list[list[float]]:
    """Attention weights of each query head by the definition of softmax."""
    group = len(query) // len(keys)
    found = []
    for head, vector in enumerate(query):
        logits = [scaling * sum(a * b for a, b in zip(vector, key, strict=True)) for key in keys[head // group]]
        if softcap is not None:
            logits = [softcap * math.tanh(logit / softcap) for logit in logits]
        powers = [math.exp(logit) if there else 0.0 for logit, there in zip(logits, valid, strict=True)]
        total = sum(powers) + (math.exp(sinks[head]) if sinks is not None else 0.0)
        found.append([power / total for power in powers])
    return found


@settings(max_examples=60)
@given(SHAPES, st.integers(0, 2**31), st.sampled_from(["none", "bool", "additive", "padding"]),
       st.sampled_from([None, 2.0]), st.booleans(), st.sampled_from([None, 8, 40]))
def test_a_probe_equals_plain_loops(shape: tuple[int, int, int, int], seed: int, form: str, softcap: float | None,
                                    with_sinks: bool, window: int | None) -> None:
    """Groups of heads, holes and padding in any form of mask, windows, soft caps and learnable sinks."""
    rows, kv_heads, group, length = shape
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(rows, kv_heads * group, 1, 4, generator=generator)
    key = torch.randn(rows, kv_heads, length, 4, generator=generator)
    there = torch.rand(rows, length, generator=generator) < 0.7
    there[:, -1] = True
    sinks = torch.randn(kv_heads * group, generator=generator) if with_sinks else None
    mask = {"none": None, "bool": there[:, None, None],
            "additive": torch.zeros(rows, 1, 1, length).masked_fill(~there[:, None, None], torch.finfo().min),
            "padding": there.long()}[form]
    probe = AttentionProbe()
    probe.begin(length, True)
    probe.layer(0, "full", query, key, mask, token_bytes=32, scaling=0.5, softcap=softcap, sinks=sinks, window=window)
    found = probe.end()
    assert found is not None
    sums, reference = Sums(), Reference(32)
    for row in range(rows):
        valid = [(form == "none" or bool(there[row, j])) and (window is None or length - 1 - j < window)
                 for j in range(length)]
        vectors, keys = query[row, :, 0].tolist(), key[row].tolist()
        weights = weights_of(vectors, keys, valid, 0.5, softcap, sinks.tolist() if sinks is not None else None)
        reference.row(sums, 0, row, weights, valid, length)
        entries(sums, vectors, keys, valid)
    for name, value in asdict(sums).items():
        assert getattr(found["full"], name) == pytest.approx(value, rel=1e-4, abs=1e-4), name


@given(st.lists(st.tuples(st.sampled_from([0.001, 0.05, 0.08, 0.2]), st.integers(0, 40), st.booleans()),
                min_size=1, max_size=25), st.integers(1, 60), st.integers(20, 70))
def test_the_life_cycle_equals_a_plain_state_machine(steps: list[tuple[float, int, bool]], start: int,
                                                     window: int) -> None:
    """Over growing and rolling windows, gaps and scores on the threshold, every count equals the plain machine's."""
    cycle, reference, seen = LifeCycle(), Reference(5), start
    for score, place, consecutive in steps:
        length = min(seen, window)
        row = [0.01] * length
        row[place % length] = score
        sums = Sums()
        reference.row(sums, 0, 0, [row], [True] * length, seen, consecutive=consecutive)
        found = cycle.step("x", torch.tensor([[row]], dtype=torch.float64), None, max(0, seen - length),
                           torch.tensor([5]), consecutive=consecutive)
        assert [int(number) for number in found] == [
            sums.blocks, sums.pending, sums.to_pending, sums.to_active, sums.reclaimable_bytes]
        seen += 1


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


def test_half_precision_is_close() -> None:
    """In bfloat16, whose products carry eight bits, shares are within 2 % of those in float32."""
    generator = torch.Generator().manual_seed(5)
    query, key = torch.randn(1, 4, 1, 64, generator=generator), torch.randn(1, 2, 300, 64, generator=generator)
    found = []
    for kind in (torch.float32, torch.bfloat16):
        probe = AttentionProbe()
        probe.begin(300, True)
        probe.layer(0, "full", query.to(kind), key.to(kind), None, token_bytes=1, scaling=0.125)
        found.append(probe.end()["full"])  # type: ignore[index]
    assert found[1].local_sum == pytest.approx(found[0].local_sum, rel=0.02)
    assert found[1].alive == pytest.approx(found[0].alive, rel=0.02)


def test_nothing_that_was_shown_is_changed_or_kept() -> None:
    """Inputs are as they were, also under autocast and inference mode, and die with their owner."""
    import weakref

    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 20, 8)
        copies = query.clone(), key.clone()
        probe = AttentionProbe()
        probe.begin(20, True)
        probe.layer(0, "full", query, key, None, token_bytes=1, scaling=0.3)
        assert probe.end() is not None
        assert torch.equal(query, copies[0])
        assert torch.equal(key, copies[1])
    gone = weakref.ref(key)
    del key
    assert gone() is None
