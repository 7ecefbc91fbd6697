"""Turns that a pause of the overhead guard falls into: their steps are told, they themselves are not; by arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvobs import model
from tests.contract import ledger, tiny

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


def at(step: int, do: Callable[[], None], *more: tuple[int, Callable[[], None]]) -> Callable[..., Any]:
    """A stopping criterion that never stops, and does something after the given decoded tokens."""
    plans, count = dict([(step, do), *more]), 0

    def criterion(ids: Any, *_: Any, **__: Any) -> Any:
        nonlocal count
        count += 1
        plans.get(count, lambda: None)()
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    return criterion


def cut(events: list[Any]) -> int:
    """The number of cut turns that the last poll told; 0 where it told none."""
    told = [value for event in events if isinstance(event, model.Poll) for name, _, value in event.readings
            if name == "kvobs.self.turns.cut"]
    return int(told[-1]) if told else 0


def of(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def test_nothing_is_cut_without_a_pause(watch: Any, llama: Any) -> None:
    """Without a pause turns are told and none is counted as cut."""
    tiny.greedy(llama, tiny.prompt(6), 4)
    events = watch.events()
    assert (len(of(events, model.Turn)), of(events, model.Poll)) == (1, [])


def test_a_call_across_a_pause_is_not_told(watching: Callable[..., Any], tracer: Any, spans: Any, llama: Any) -> None:
    """Its steps before and after the pause are told with true sizes, but no turn; the span ends without sums."""
    watch = watching(tracer)
    criterion = at(3, watch.bus.pause, (6, watch.bus.resume))
    tiny.greedy(llama, tiny.prompt(10), 9, stopping_criteria=[criterion])
    events = watch.events()
    row = tiny.row_bytes(llama)
    steps = of(events, model.Step)
    assert [step.kv_bytes for step in steps] == [n * row for n in (10, 11, 12, 16, 17, 18)]
    assert [step.bytes_written for step in steps] == [10 * row, row, row, row, row, row]
    assert [step.bytes_copied for step in steps] == [0, 10 * row, 11 * row, 15 * row, 16 * row, 17 * row]
    assert of(events, model.Turn) == []
    assert cut(events) == 1
    (span,) = spans.get_finished_spans()
    assert not [name for name in span.attributes if name.startswith(("kvobs.", "gen_ai.usage."))]
    tiny.greedy(llama, tiny.prompt(6), 4)
    events = watch.events()
    (turn,) = of(events, model.Turn)
    assert (turn.steps, turn.bytes_written, turn.new_tokens, cut(events)) == (4, 9 * row, 4, 1)


def test_a_call_that_begins_in_a_pause_is_not_told(watch: Any, llama: Any) -> None:
    """Its steps after the pause are told with true sizes, but neither as its turn nor as one of bare passes."""
    watch.bus.pause()
    tiny.greedy(llama, tiny.prompt(6), 6, stopping_criteria=[at(3, watch.bus.resume)])
    events = watch.events()
    row = tiny.row_bytes(llama)
    assert [step.kv_bytes for step in of(events, model.Step)] == [n * row for n in (9, 10, 11)]
    assert not any(step.prefill for step in of(events, model.Step))
    assert (of(events, model.Turn), cut(events)) == ([], 1)
    watch.source._hooks.close_idle(0, everything=True)
    assert watch.turns() == []


def test_a_call_within_a_pause_leaves_the_next_turn_true(watch: Any, llama: Any) -> None:
    """A turn that nobody saw is no cut one; the next over the same cache tells only what it did itself."""
    cache = transformers.DynamicCache(config=llama.config)
    more = {tiny.CACHE: cache, "do_sample": False}
    first = llama.generate(tiny.prompt(6), max_new_tokens=4, **more)
    watch.events()
    watch.bus.pause()
    second = llama.generate(torch.cat([first, tiny.prompt(5)], 1), max_new_tokens=4, **more)
    watch.bus.resume()
    third = llama.generate(torch.cat([second, tiny.prompt(7)], 1), max_new_tokens=4, **more)
    events = watch.events()
    (turn,) = of(events, model.Turn)
    row, before, after = tiny.row_bytes(llama), second.shape[1] - 1, third.shape[1] - 1
    assert (turn.cached_tokens, turn.prompt_tokens, turn.new_tokens) == (before, before + 8, 4)
    assert turn.bytes_written == (after - before) * row
    assert turn.bytes_copied == sum([before, *range(before + 8, after)]) * row
    assert (turn.kv_bytes, turn.kv_reserved_bytes) == (cache.get_seq_length() * row, ledger.reserved(cache))
    assert cut(events) == 0


def test_bare_passes_across_a_pause_are_not_told(watch: Any, llama: Any) -> None:
    """The turn of bare passes is cut once, what is left of it is no turn either, and the next one is told whole."""
    cache = transformers.DynamicCache(config=llama.config)
    row = tiny.row_bytes(llama)
    tiny.chat(llama, cache, 10, 3)
    watch.bus.pause()
    tiny.chat(llama, cache, 1, 3)
    watch.bus.resume()
    tiny.chat(llama, cache, 1, 2)
    events = watch.events()
    steps = of(events, model.Step)
    assert [step.kv_bytes for step in steps] == [n * row for n in (10, 11, 12, 16, 17)]
    assert [step.bytes_copied for step in steps[3:]] == [15 * row, 16 * row]
    assert [step.prefill for step in steps] == [True, False, False, False, False]
    tiny.chat(llama, cache, 4, 3)
    watch.source._hooks.close_idle(0, everything=True)
    events += watch.events()
    (turn,) = of(events, model.Turn)
    assert (turn.steps, turn.cached_tokens, turn.prompt_tokens, turn.new_tokens) == (3, 17, 21, 2)
    assert turn.bytes_written == 6 * row
    assert cut(events) == 1


def test_a_cache_filled_in_a_pause_is_followed_after_it(watch: Any, llama: Any) -> None:
    """A cache that was made in the pause is measured from the first pass after it; its turn is not told."""
    cache = transformers.DynamicCache(config=llama.config)
    row = tiny.row_bytes(llama)
    watch.bus.pause()
    tiny.chat(llama, cache, 10, 3)
    watch.bus.resume()
    tiny.chat(llama, cache, 1, 2)
    watch.source._hooks.close_idle(0, everything=True)
    events = watch.events()
    steps = of(events, model.Step)
    assert [(step.kv_bytes, step.bytes_written) for step in steps] == [(13 * row, row), (14 * row, row)]
    assert of(events, model.Turn) == []


@pytest.mark.parametrize("change", ["crop", "reorder", "moved"])
def test_what_changed_in_a_pause_is_not_told_but_its_sizes_are(watch: Any, llama: Any, change: str) -> None:
    """After a crop, a reorder or new buffers in the pause the next pass tells its own copies and the true sizes."""
    cache = transformers.DynamicCache(config=llama.config)
    row = tiny.row_bytes(llama)
    tiny.chat(llama, cache, 10, 2)
    watch.events()
    watch.bus.pause()
    if change == "crop":
        cache.crop(-4)
    elif change == "reorder":
        cache.reorder_cache(torch.zeros(1, dtype=torch.long))
    else:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    watch.bus.resume()
    held = cache.get_seq_length() * row
    tiny.chat(llama, cache, 1, 1)
    events = watch.events()
    (step,) = of(events, model.Step)
    assert (step.kv_bytes, step.kv_reserved_bytes) == (held + row, ledger.reserved(cache))
    assert (step.bytes_written, step.bytes_copied, step.reallocations) == (row, held, 6)
    assert not of(events, model.Rewrite)


def test_sampling_begins_anew_after_a_pause(deep: Any, llama: Any) -> None:
    """Block states do not outlast a pause: the steps after it find every block Active again."""
    cache = transformers.DynamicCache(config=llama.config)
    tiny.chat(llama, cache, 20, 10)
    assert deep.of(model.Attention)[-1].pending > 0
    deep.bus.pause()
    tiny.chat(llama, cache, 1, 2)
    deep.bus.resume()
    tiny.chat(llama, cache, 1, 2)
    assert [sample.pending for sample in deep.of(model.Attention)] == [0, 0]
