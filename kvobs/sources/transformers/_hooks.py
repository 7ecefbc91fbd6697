"""The hooks themselves: thin wrappers that measure, and pass everything through unchanged."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvobs.bus import Bus
from kvobs.model import Migration, OutOfMemory, Step
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._actions import Actions
from kvobs.sources.transformers._between import Between
from kvobs.sources.transformers._caches import CacheRecord, CacheRegistry
from kvobs.sources.transformers._calls import Call, cache_in, cache_out, describe, model_name, query_shape
from kvobs.sources.transformers._layers import layers_of, measurable
from kvobs.sources.transformers._local import Local
from kvobs.sources.transformers._sample import PassSample
from kvobs.sources.transformers._sweep import Delta
from kvobs.sources.transformers._turns import LiveTurn, Turns, outcome_of

if TYPE_CHECKING:
    from kvobs.sources.transformers._deep import Deep

Function = Callable[..., Any]
IDLE_NS = 5_000_000_000


class Hooks:
    """Makes the wrappers. ``local`` is per thread: inside a forward pass, and the generate call in progress."""

    def __init__(self, bus: Bus, patches: Patches, caches: CacheRegistry, turns: Turns,
                 is_compiling: Callable[[], bool], is_tracing: Callable[[], bool], record_prompts: bool,
                 deep: Deep | None, local: Local, actions: Actions) -> None:
        self._bus, self._patches, self._caches, self._turns = bus, patches, caches, turns
        self._is_compiling, self._is_tracing = is_compiling, is_tracing
        self._broken = False
        self._record_prompts = record_prompts
        self._local, self._deep, self._actions = local, deep, actions
        self.cut = 0  # turns that are not told because a pause fell into them
        self.between = Between(bus, patches, caches, self._local, is_compiling, actions)

    # -- forward passes --------------------------------------------------------------------------------

    def forward(self, original: Function) -> Function:
        """Around ``PreTrainedModel.__call__``: the outermost forward pass is a step."""
        bus, local, is_compiling, observed = self._bus, self._local, self._is_compiling, self._observed

        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not bus.active or local.busy:
                return original(self, *args, **kwargs)
            return observed(self, original, (self, *args), kwargs)

        return __call__

    def compiled(self, original: Function) -> Function:
        """Around ``get_compiled_call``: the compiled forward is a step, timed and swept from outside."""
        bus, local, is_compiling, observed = self._bus, self._local, self._is_compiling, self._observed

        def get_compiled_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            inner = original(self, *args, **kwargs)
            if not bus.active or is_compiling():
                return inner
            model = self

            def call(*args: Any, **kwargs: Any) -> Any:
                if not bus.active or local.busy:
                    return inner(*args, **kwargs)
                return observed(model, inner, args, kwargs, compiled=True)

            return call

        return get_compiled_call

    def _observed(self, model: Any, run: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *,
                  compiled: bool = False) -> Any:
        if self._broken or self._is_tracing():
            return run(*args, **kwargs)
        local = self._local
        entered = time.monotonic_ns()
        turn, prefill = local.turn, False
        try:
            cache = cache_in(kwargs, tuple(value for value in args if value is not model))
            if turn is not None and cache is None and model is not turn.owner:
                turn = None  # an encoder that runs ahead of the first step: part of its time, not a step
            record = self._followed(cache, model) if cache is not None else None
            if record is not None and self._actions.cuts is not None:
                self._actions.cuts.passing(record, model, tuple(value for value in args if value is not model), kwargs)
            if turn is not None:
                prefill = turn.begins(entered)
            if self._deep is not None and self._bus.deep and (turn is not None or local.turn is None):
                if record is not None:
                    local.sample = self._deep.begins(record, query_shape(args, kwargs)[1], compiled=compiled)
                elif cache is not None or (turn is not None and turn.steps):
                    self._deep.cannot(model_name(model), cache)
        except Exception as error:
            self._give_up(error)
            return run(*args, **kwargs)
        local.busy = True
        before = time.monotonic_ns()
        self._actions.begins(record)
        try:
            output = run(*args, **kwargs)
        except BaseException as error:
            if local.turn is None:
                self._failed_outside(error, cache)
            self.between.resweep(cache)
            raise
        finally:
            after = time.monotonic_ns()
            local.busy = False
            self._actions.ends(record)
            sample, local.sample = local.sample, None
        try:
            if turn is not None or local.turn is None:
                self._after(model, cache, args, kwargs, output, turn, prefill, entered, before, after, sample)
        except Exception as error:
            self._give_up(error)
        if self._actions.point.waiting:
            self._actions.point.run()
        return output

    def _give_up(self, error: Exception) -> None:
        """Without steps no turn could be told: nothing more of this source is reported."""
        self._broken = True
        self._patches.fail("PreTrainedModel.__call__", error)

    def _after(self, model: Any, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any,
               turn: LiveTurn | None, prefill: bool, entered: int, before: int, after: int,
               sample: PassSample | None) -> None:
        if cache is None:
            cache = cache_out(output)
        layers = None if cache is None else layers_of(cache)
        if layers is None:
            if turn is not None:
                turn.took_without_cache(after)
            return
        record = self._caches.find(cache)
        if record is None:
            self._caches.models.add(model)
            record = self._caches.add(cache, model_name(model), layers, self._bus.epoch, fresh=True)
        if record.origin is None:
            record.blind = not measurable(layers)
        if record.blind:
            if turn is not None:
                turn.took_without_cache(after)
            return
        rows, length = query_shape(args, kwargs)
        try:
            delta = record.sweep.step(layers, length)
        except (RuntimeError, NotImplementedError):
            self.between.lose_sight(record)  # tensors without memory of their own, as inside torch.func transforms
            if turn is not None:
                turn.took_without_cache(after)
            return
        origin = record.origin
        if origin is None or delta.by_device or delta.moves:
            origin = record.identify(cache, layers)
        if turn is not None:
            turn.took(record, delta, length, prefill, after)
            record.belongs(turn.session, turn.number, named=turn.named)
            record.adrift = False
        else:
            prefill = self._bare(record, model, delta, rows, length, before, after)
        for src, dst, buffers, size in delta.moves:
            self._bus.publish(Migration(after, origin, record.id, src, dst, buffers, size, None))
        inside = sample.spent_ns if sample is not None else 0
        if sample is not None and self._deep is not None:
            self._deep.ends(sample, record, origin, turn, after, after - before - inside)
        self._bus.publish(Step(
            after, after - before - inside, before - entered + time.monotonic_ns() - after + inside, origin, record.id,
            prefill, rows * length, delta.held, delta.reserved, delta.largest, delta.reallocations, delta.written,
            delta.copied, delta.by_device))

    def _followed(self, cache: Any, model: Any) -> CacheRecord | None:
        """The cache's record, made or brought up to date after a pause."""
        record = self._caches.find(cache)
        if record is not None and record.epoch == self._bus.epoch:
            return record
        layers = layers_of(cache)
        if layers is None:
            return record
        if record is None:
            self._caches.models.add(model)
            return self._caches.add(cache, model_name(model), layers, self._bus.epoch)
        if not record.blind:
            record.begin_again(layers, self._bus.epoch)
        return record

    # -- bare forward passes ---------------------------------------------------------------------------

    def _bare(self, record: CacheRecord, model: Any, delta: Delta, rows: int, length: int, before: int,
              after: int) -> bool:
        """Count a pass outside generate; a multi-token pass after single-token ones begins the next turn."""
        with record.lock:
            turn: LiveTurn | None = record.bare
            if turn is not None and turn.epoch != self._bus.epoch:
                record.bare = turn = None
                self.cut += 1
            record.adrift = record.adrift and length == 1
            if record.adrift or self._local.astray:
                return length > 1
            if turn is not None and length > 1 and turn.first_ns is not None:
                record.bare = None
                self.close_bare(turn)
                turn = None
            if turn is None:
                turn = self._turns.open(None, record.model, record, None)
                turn.epoch = self._bus.epoch
                turn.wall_start_ns -= turn.start_ns - before
                turn.start_ns = before
                turn.rows = rows
                turn.parent = _current_context()
                record.bare = turn
                prefill = True
            else:
                prefill = length > 1
                if not prefill and turn.first_ns is None:
                    turn.first_ns = before
            turn.took(record, delta, length, prefill, after)
            if prefill:
                turn.prompt = turn.consumed
            return prefill

    def close_bare(self, turn: LiveTurn) -> None:
        """End a turn of bare passes at its last pass; its span is written as a whole."""
        if turn.epoch != self._bus.epoch:
            self.cut += 1
            return
        self._turns.trace(turn, {}, turn.parent, attach=False)
        self._turns.close(turn, new_per_row=None, new_tokens=0, prompt_tokens=turn.prompt * turn.rows,
                          cached_tokens=turn.cached * turn.rows, end_ns=turn.last_ns, error=None, attributes={})

    def close_idle(self, now_ns: int, *, everything: bool = False) -> None:
        """Close bare turns whose cache is gone or which have been idle for five seconds."""
        gone = []
        while self._caches.gone:
            gone.append(self._caches.gone.popleft())
        for record in [*gone, *self._caches.records()]:
            with record.lock:
                turn: LiveTurn | None = record.bare
                if turn is None or not (everything or record in gone or now_ns - turn.last_ns > IDLE_NS):
                    continue
                record.bare = None
            self.close_bare(turn)

    def after_fork_in_child(self) -> None:
        """Open turns are the parent's to tell; locks that its threads may have held are made anew."""
        self._local.turn = None
        self.cut = 0
        for record in self._caches.records():
            record.lock, record.bare = threading.Lock(), None
        self._caches.gone.clear()

    def _failed_outside(self, error: BaseException, cache: Any) -> None:
        # A paged cache has no layers: continuous batching tells of its failures itself.
        if outcome_of(error) == "out_of_memory" and (cache is None or layers_of(cache) is not None):
            record = self._caches.find(cache) if cache is not None else None
            self._bus.publish(OutOfMemory(time.monotonic_ns(), record.origin if record else None,
                                          "", str(error)[:500]))

    # -- generate --------------------------------------------------------------------------------------

    def generate(self, original: Function) -> Function:
        """Around ``GenerationMixin.generate``: a call is a turn and a span."""
        bus, local, is_compiling, hooks = self._bus, self._local, self._is_compiling, self

        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            outer = local.turn
            if not bus.active and not is_compiling():
                return hooks._unseen(original, self, args, kwargs)
            if is_compiling() or hooks._broken or kwargs.get("cache_implementation") == "paged" or (
                    outer is not None and outer.owner is self and not outer.steps):
                return original(self, *args, **kwargs)
            entered = time.monotonic_ns()
            try:
                call = describe(self, args, kwargs)
            except Exception:
                # The call itself is odd, and will most likely say so; others are still to be told.
                return original(self, *args, **kwargs)
            try:
                record = hooks._caches.find(call.cache) if call.cache is not None else None
                turn = hooks._turns.open(self, model_name(self), record, outer)
                turn.prompt, turn.rows, turn.epoch = call.prompt, call.rows, bus.epoch
                hooks._turns.trace(turn, call.attributes)
            except Exception as error:
                hooks._patches.fail("GenerationMixin.generate", error)
                return original(self, *args, **kwargs)
            local.turn = turn
            hooks._actions.begins()
            turn.hook_ns = time.monotonic_ns() - entered
            failure: BaseException | None = None
            result: Any = None
            try:
                result = original(self, *args, **kwargs)
            except BaseException as error:
                failure = error
                raise
            finally:
                left = time.monotonic_ns()
                local.turn = outer
                hooks._actions.ends()
                try:
                    hooks._turns.leave(turn)
                    hooks._close(turn, call, result, left, failure, outer)
                except Exception as error:
                    hooks._patches.fail("GenerationMixin.generate", error)
                # The exception's traceback holds this frame: a frame that held the exception would keep both, and
                # every tensor below them, alive until the cyclic collector comes by.
                failure = None
            if hooks._actions.point.waiting and not local.busy:
                hooks._actions.point.run()
            return result

        return generate

    def _unseen(self, original: Function, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that begins in a pause: should observation go on before its end, its steps belong to no turn."""
        local, epoch, before = self._local, self._bus.epoch, self._local.astray
        local.astray = True
        self._actions.begins()
        try:
            return original(model, *args, **kwargs)
        finally:
            local.astray = before
            self._actions.ends()
            interrupted = self._bus.active or self._bus.epoch != epoch
            self.cut += interrupted and not before and local.turn is None

    def _close(self, turn: LiveTurn, call: Call, result: Any, end_ns: int, failure: BaseException | None,
               outer: LiveTurn | None) -> None:
        if turn.process != os.getpid():
            return  # forked within the call: the turn and its span are the parent's
        if self._broken or turn.epoch != self._bus.epoch:
            self.cut += not self._broken
            self._turns.abandon(turn)
            return
        new_per_row, new_tokens, attributes = call.outcome(result, self._record_prompts)
        prompt_tokens, cached_tokens = call.prompt_tokens(turn)
        self._turns.close(turn, new_per_row=new_per_row, new_tokens=new_tokens, prompt_tokens=prompt_tokens,
                          cached_tokens=cached_tokens, end_ns=end_ns, error=failure, attributes=attributes,
                          outer=outer)


def _current_context() -> Any:
    from opentelemetry import context

    return context.get_current()
