"""Errors of the host and of kvobs: outcomes, what is let go, what goes on."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
transformers = pytest.importorskip("transformers", reason="pip install 'kvobs[torch]' brings transformers.")

from opentelemetry import trace

from kvobs import model as events
from tests.contract import tiny
from tests.contract.tiny import named

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.llama()


@pytest.fixture
def traced(watching: Callable[..., Any], tracer: Any) -> Any:
    return watching(tracer)


# -- errors ------------------------------------------------------------------------------------------------


class Failing:
    """Raises the given error from the second forward pass, deep inside the model."""

    def __init__(self, model: Any, error: BaseException) -> None:
        self.model, self.error, self.passes = model, error, 0

    def __enter__(self) -> None:
        original = type(self.model.model).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            if self.passes == 2:
                raise self.error
            return original(self.model.model, *args, **kwargs)

        self.model.model.forward = forward

    def __exit__(self, *exc: object) -> None:
        del self.model.model.forward


OOM = "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
ERRORS = {
    "error": ValueError("no"),
    "out_of_memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "out_of_memory (CPU)": RuntimeError(OOM),
    "cancelled": KeyboardInterrupt(),
}


@pytest.mark.parametrize("outcome", list(ERRORS))
def test_an_error_passes_unchanged_and_is_told_once(traced: Any, tracer: Any, spans: Any, llama: Any,
                                                    outcome: str) -> None:
    """The very exception arrives at the caller; turn and span say how the call ended; memory errors count once."""
    error = ERRORS[outcome]
    with tracer.start_as_current_span("request") as outer:
        with Failing(llama, error), pytest.raises(type(error)) as caught:
            tiny.greedy(llama, tiny.prompt(4), 5)
        assert trace.get_current_span() is outer
    assert caught.value is error
    seen = traced.events()
    (turn,) = [e for e in seen if isinstance(e, events.Turn)]
    memory = [e for e in seen if isinstance(e, events.OutOfMemory)]
    assert (turn.outcome, turn.steps) == (outcome.split()[0], 1)
    assert turn.kv_bytes == 4 * tiny.row_bytes(llama)
    assert len(memory) == (turn.outcome == "out_of_memory")
    (span,) = named(spans, "text_completion LlamaForCausalLM")
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.attributes["error.type"] == type(error).__qualname__
    assert ("kvobs.out_of_memory" in [event.name for event in span.events]) == bool(memory)
    tiny.greedy(llama, tiny.prompt(4), 2)
    assert traced.turn().outcome == "ok"


def test_an_error_of_an_assistant_is_one_error(watch: Any, llama: Any) -> None:
    """Running out of memory in an assistant's call ends that call and the outer one, and is one out-of-memory event."""
    assistant = tiny.llama(layers=1, seed=3)
    with Failing(assistant, torch.OutOfMemoryError("out of memory")), pytest.raises(torch.OutOfMemoryError):
        tiny.greedy(llama, tiny.prompt(4), 8, assistant_model=assistant)
    seen = watch.events()
    assert len([e for e in seen if isinstance(e, events.OutOfMemory)]) == 1
    outcomes = [e.outcome for e in seen if isinstance(e, events.Turn)]
    assert outcomes[-2:] == ["out_of_memory"] * 2
    assert set(outcomes[:-2]) <= {"ok"}


def test_a_bare_pass_without_memory_is_told(watch: Any, llama: Any) -> None:
    """Outside generate, too, an out-of-memory error is an event, once, and passes."""
    error = torch.OutOfMemoryError("out of memory")
    cache = transformers.DynamicCache(config=llama.config)
    with Failing(llama, error), torch.no_grad():
        llama(input_ids=tiny.prompt(4), **{tiny.CACHE: cache})
        with pytest.raises(torch.OutOfMemoryError) as caught:
            llama(input_ids=tiny.prompt(1), **{tiny.CACHE: cache})
    assert caught.value is error
    (event,) = watch.of(events.OutOfMemory)
    assert event.origin.model == "LlamaForCausalLM"


def test_bad_arguments_fail_as_without_kvobs(watch: Any, llama: Any) -> None:
    """What transformers refuses it refuses with the same text, and the turn is an error without steps."""
    texts = []
    for active in (False, True):
        watch.bus.active = active
        with pytest.raises(ValueError, match=r".+") as caught:
            tiny.greedy(llama, tiny.prompt(4), 2, no_such_argument=1)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    turn = watch.turn()
    assert (turn.outcome, turn.steps, turn.new_tokens, turn.ttft_ns) == ("error", 0, 0, None)


# -- failures of kvobs itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "find"])
def test_a_hook_that_raises_is_detached_once(traced: Any, spans: Any, llama: Any, where: str,
                                             monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
    """Generation goes on with the same tokens; one log line, one event; no turn with wrong sums; context restored."""
    from kvobs.sources.transformers._caches import CacheRegistry
    from kvobs.sources.transformers._sweep import CacheSweep

    ids = tiny.prompt(4)
    traced.bus.active = False
    expected = tiny.greedy(llama, ids, 5)
    traced.bus.active = True

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("kvobs's own mistake")

    monkeypatch.setattr(CacheSweep if where == "step" else CacheRegistry, where, broken)
    with caplog.at_level(logging.WARNING, "kvobs"):
        assert torch.equal(tiny.greedy(llama, ids, 5), expected)
        assert torch.equal(tiny.greedy(llama, ids, 5), expected)
    assert len(caplog.records) == 1
    assert "PreTrainedModel.__call__" in caplog.text
    seen = traced.events()
    assert len([e for e in seen if isinstance(e, events.HookFailed)]) == 1
    assert not [e for e in seen if isinstance(e, events.Turn)]
    assert trace.get_current_span() is trace.INVALID_SPAN
    assert "__call__" not in vars(transformers.PreTrainedModel)


def test_a_failing_generate_hook_leaves_generate_alone(traced: Any, llama: Any, monkeypatch: pytest.MonkeyPatch,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    """When opening a turn fails, generate is put back and runs; passes are still followed."""
    from kvobs.sources.transformers._turns import Turns

    original, opening = Turns.open, []

    def broken(self: Any, *args: Any) -> Any:
        opening.append(1)
        if len(opening) == 1:
            raise ZeroDivisionError
        return original(self, *args)

    monkeypatch.setattr(Turns, "open", broken)
    tiny.greedy(llama, tiny.prompt(4), 3)
    gc.collect()
    seen = traced.events()
    assert [e.hook for e in seen if isinstance(e, events.HookFailed)] == ["GenerationMixin.generate"]
    assert len(caplog.records) == 1
    assert len([e for e in seen if isinstance(e, events.Step)]) == 3


def test_a_failed_call_lets_go_of_its_cache_at_once(traced: Any, llama: Any) -> None:
    """Without the cyclic collector the cache of a generate that raised is freed, as it is without kvobs."""
    class Full:
        def __call__(self, *_: Any, **__: Any) -> Any:
            raise MemoryError("full")

    made: list[weakref.ref[Any]] = []
    original = transformers.DynamicCache.__init__

    def noticed(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        made.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.DynamicCache, "__init__", noticed)
            with contextlib.suppress(MemoryError):
                tiny.greedy(llama, tiny.prompt(4), 3, stopping_criteria=[Full()])
        assert made
        assert [ref() for ref in made] == [None] * len(made)
    finally:
        gc.enable()


def test_one_odd_call_costs_no_other_its_turn(traced: Any, llama: Any) -> None:
    """A call with a scalar for input ends in the host's own error; the next one is a turn like any other."""
    with pytest.raises(Exception):  # noqa: B017, PT011
        llama.generate(torch.tensor(5))
    tiny.greedy(llama, tiny.prompt(4), 3)
    assert [turn.new_tokens for turn in traced.turns()] == [3]


def test_a_long_chat_keeps_counting_among_many_others(traced: Any, llama: Any) -> None:
    """The turns of a cache go on counting although thousands of sessions that nobody named came in between."""
    cache = transformers.DynamicCache(config=llama.config)
    ids = tiny.greedy(llama, tiny.prompt(4), 2, **{tiny.CACHE: cache})
    turns = traced.source._hooks._turns
    for _ in range(3_000):
        turns.open(None, "m", None, None)
    tiny.greedy(llama, ids, 2, **{tiny.CACHE: cache})
    assert [turn.turn for turn in traced.turns()] == [1, 2]


def test_a_failed_pass_leaves_the_true_sizes(traced: Any, llama: Any) -> None:
    """When a layer fails half way through a pass, what the cache holds now is told."""
    cache = transformers.DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(tiny.prompt(4), **{tiny.CACHE: cache})
        traced.events()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama.model.layers[-1].mlp, "forward", lambda *_: (_ for _ in ()).throw(MemoryError("full")))
            with pytest.raises(MemoryError):
                llama(tiny.prompt(3), **{tiny.CACHE: cache})
    (sizes,) = [event for event in traced.events() if isinstance(event, events.Resized)]
    assert sizes.kv_bytes == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def test_a_bare_turn_does_not_hold_its_model(traced: Any, llama: Any) -> None:
    """While the turn of a bare loop is open, a model that was deleted is freed at once."""
    model = copy.deepcopy(llama)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(tiny.prompt(4), **{tiny.CACHE: cache})
    ref = weakref.ref(model)
    del model
    assert ref() is None


def test_a_name_that_is_no_text_is_made_one(traced: Any, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a path that are not UTF-8 are shown escaped, so that every exporter can encode the name."""
    monkeypatch.setattr(llama.config, "_name_or_path", os.fsdecode(b"/models/caf\xe9"))
    tiny.greedy(llama, tiny.prompt(4), 2)
    (turn,) = traced.turns()
    assert turn.origin.model.encode() == b"caf\\udce9"


def test_a_cache_that_cannot_be_measured_is_no_longer_counted(traced: Any, llama: Any) -> None:
    """When a followed cache loses its memory (as under torch.func), its sizes are taken back and others go on."""
    from kvobs.metrics import Metrics
    from kvobs.sources.transformers._sweep import CacheSweep

    def without_storage(*_: Any) -> Any:
        raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")

    metrics, cache = Metrics(), transformers.DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(tiny.prompt(4), **{tiny.CACHE: cache})
        metrics.fold(traced.events())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CacheSweep, "step", without_storage)
            llama(tiny.prompt(1), **{tiny.CACHE: cache})
    metrics.fold(traced.events())
    metrics.refresh(0)
    assert "kvobs.kv.usage" not in {row.name for row, _ in metrics.collect()}
    tiny.greedy(llama, tiny.prompt(4), 2)
    assert [turn.new_tokens for turn in traced.turns()] == [2]
