"""The overhead guard pauses observation: what spans a pause is not told as whole, and sizes are right after it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvobs import model
from tests.contract import tiny

pytestmark = pytest.mark.torch


def cut(watch: Any) -> int:
    """How many turns the source says were cut so far."""
    polls = [poll for poll in watch.source.sample(0) if isinstance(poll, model.Poll)]
    assert all(poll.readings[0][0] == "kvobs.self.turns.cut" for poll in polls)
    return int(polls[-1].readings[0][2]) if polls else 0


class Pausing:
    """A streamer that pauses, resumes, or both, when the given numbers of tokens have come."""

    def __init__(self, bus: Any, pause_at: int, resume_at: int | None) -> None:
        self.bus, self.pause_at, self.resume_at, self.seen = bus, pause_at, resume_at, 0

    def put(self, _: Any) -> None:
        self.seen += 1
        if self.seen == self.pause_at:
            self.bus.pause()
        if self.seen == self.resume_at:
            self.bus.resume()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("resume_at", [None, 6, 4])
def test_a_generate_call_with_a_pause_inside_is_not_told(watch: Any, resume_at: int | None) -> None:
    """Its sums would lack the paused steps: no turn, one cut; tokens are the same; the next call is whole again."""
    net = tiny.llama()
    expected = tiny.greedy(net, tiny.prompt(10), 8)
    watch.events()
    cache = transformers.DynamicCache(config=net.config)
    result = tiny.greedy(net, tiny.prompt(10), 8, streamer=Pausing(watch.bus, 4, resume_at), **{tiny.CACHE: cache})
    assert torch.equal(result, expected)
    assert watch.turns() == []
    assert cut(watch) == 1
    watch.bus.resume()
    follow = torch.cat([result, tiny.prompt(4)], 1)
    tiny.greedy(net, follow, 5, **{tiny.CACHE: cache})
    turn = watch.turn()
    assert turn.steps == 5
    assert turn.reallocations == 2 * 3 * 5
    assert turn.bytes_written == tiny.row_bytes(net) * (4 + 1 + 4)  # what the call before left out, new prompt, decode
    assert turn.kv_bytes == tiny.row_bytes(net) * cache.get_seq_length()
    assert cut(watch) == 1


def test_a_cache_that_grew_in_a_pause_begins_anew(watch: Any) -> None:
    """What was written unseen is neither written nor copied afterwards; held bytes are right in the first step."""
    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    tiny.chat(net, cache, 10, 3)
    watch.events()
    watch.bus.pause()
    tiny.chat(net, cache, 5, 6)
    assert not watch.of(model.Step)
    watch.bus.resume()
    tiny.chat(net, cache, 1, 1)
    (step,) = watch.of(model.Step)
    length = cache.get_seq_length()
    assert step.kv_bytes == tiny.row_bytes(net) * length
    assert step.bytes_written == tiny.row_bytes(net)
    assert step.bytes_copied == tiny.row_bytes(net) * (length - 1)
    assert step.reallocations == 6


def test_a_bare_turn_with_a_pause_inside_is_cut(watch: Any) -> None:
    """A turn of bare passes that was open when the pause began is counted and not told; the next one is told."""
    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    tiny.chat(net, cache, 10, 3)
    watch.bus.pause()
    watch.bus.resume()
    tiny.chat(net, cache, 5, 4)
    watch.source._hooks.close_idle(0, everything=True)
    (turn,) = watch.turns()
    assert turn.steps == 4
    assert cut(watch) == 1


def test_a_crop_in_a_pause_is_no_rewrite(watch: Any) -> None:
    """A cache cropped while paused, and cropped again after it, tells the second crop's sizes and no false copies."""
    net = tiny.llama()
    cache = transformers.DynamicCache(config=net.config)
    tiny.chat(net, cache, 10, 3)
    watch.bus.pause()
    cache.crop(-3)
    watch.bus.resume()
    watch.events()
    cache.crop(-1)
    sizes = watch.of(model.Resized, model.Rewrite)
    assert [type(event) for event in sizes] == [model.Resized]
    assert sizes[0].kv_bytes == tiny.row_bytes(net) * 8


def test_a_forked_child_has_cut_no_turn(watch: Any) -> None:
    """Turns that a pause cut in the parent are the parent's to count."""
    net = tiny.llama()
    tiny.greedy(net, tiny.prompt(10), 8, streamer=Pausing(watch.bus, 4, 6))
    assert cut(watch) == 1
    watch.source.after_fork_in_child()
    assert cut(watch) == 0
