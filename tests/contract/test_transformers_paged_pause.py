"""Continuous batching when the overhead guard pauses: open requests are cut and counted, later ones are whole."""

from __future__ import annotations

from typing import Any

import pytest

from kvobs import model
from tests.contract import paged
from tests.contract.paged import Ledger, Observed, answers, continuous_api, greedy, pool, prompts

pytestmark = pytest.mark.torch
llama, ledger, observed = paged.llama, paged.ledger, paged.observed  # fixtures are found by their names


def test_requests_with_a_pause_inside_are_cut(llama: Any, observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause in the third step drops the three open requests and counts them; answers are those of an unpaused run."""
    expected = answers(llama, prompts(3), greedy(8), pool())
    assert len(observed.of(model.Turn)) == 3
    observed._seen.clear()
    original, steps = continuous_api.ContinuousBatchProcessor._generation_step, []

    def step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        steps.append(1)
        if len(steps) == 3:
            observed.bus.pause()
            observed.bus.resume()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(continuous_api.ContinuousBatchProcessor, "_generation_step", step)
        assert list(answers(llama, prompts(3), greedy(8), pool()).values()) == list(expected.values())
    assert observed.of(model.Turn) == []
    assert observed.hooks.cut == 3
    answers(llama, prompts(2), greedy(4), pool())
    turns = observed.of(model.Turn)
    assert [(turn.outcome, turn.new_tokens) for turn in turns] == [("ok", 4)] * 2
    assert observed.hooks.cut == 3


def test_steps_and_blocks_go_on_by_the_engines_ledger(llama: Any, ledger: Ledger, observed: Observed,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told before and after a pause equals an independent count, and the spans of cut requests have no sums."""
    original = continuous_api.ContinuousBatchProcessor.update_batch

    def update_batch(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if len(ledger.after_update) == 4:
            observed.bus.pause()
        elif len(ledger.after_update) == 8:
            observed.bus.resume()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(continuous_api.ContinuousBatchProcessor, "update_batch", update_batch)
        answers(llama, prompts(3), greedy(12), pool())
    told = [tuple(count * blocks.block_bytes for count in (blocks.used, blocks.cached, blocks.free))
            for blocks in observed.of(model.Blocks)]
    assert told == [*ledger.after_update[:4], *ledger.after_update[8:]]
    batches = [*ledger.batches[:4], *ledger.batches[8:]]
    assert [step.tokens for step in observed.of(model.Step)] == [sum(batch) for batch in batches]
    spans = observed.spans.get_finished_spans()
    assert len(spans) == observed.hooks.cut == 3
    assert not [key for span in spans for key in span.attributes or () if key.startswith("gen_ai.usage.")]
