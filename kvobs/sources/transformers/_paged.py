"""Continuous batching of transformers: steps, the paged pool's ledger, and one turn per request.

Supported: transformers 5.18 to 5.24 (run on 5.18, 5.19 and 5.24; those between have the same hook points). Older
5.x have another pool (``BlockManager``): there nothing is patched and the availability says so (run on 5.0).

It hooks the generation step and the batch update around it, the pool's two verdicts (blocks handed out, a request
refused), and the places where requests enter, give way to others, and leave; all on the engine's thread but
``add_request``. A step's ``kv_bytes`` are those at its end, when its requests still hold their blocks; the blocks
that follow it are those after the update, when finished requests have given theirs back. They are block-granular:
the unfilled rest of a request's last block counts as held. With asynchronous batching (CUDA) a step lasts from its
launch, or the end of the step before, until its tokens are on the host.

The hooks time themselves; two that run once per request and step and only test a result do not (0.3 µs a call).
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvobs import sessions
from kvobs.bus import Bus
from kvobs.model import Availability, Emit
from kvobs.sources import Wiring
from kvobs.sources._imports import when_imported
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._actions_paged import PagedActions
from kvobs.sources.transformers._paged_events import PagedEvents
from kvobs.sources.transformers._paged_requests import Desk, Requests

SUBJECT = "continuous batching"
_PACKAGE = "transformers.generation.continuous_batching"
_MODULE = f"{_PACKAGE}.continuous_api"

Original = Callable[..., Any]
Make = Callable[[Original], Original]
See = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Requests | None]
Point = tuple[Any, str, Callable[[str], Make]]


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """An argument of a call, however it was passed; None where it was left out."""
    return args[position] if position < len(args) else kwargs.get(name)


def _block_counts(tables: Mapping[str, Any]) -> dict[str, int]:
    return {name: len(blocks) for name, blocks in tables.items()}


def _source_counts(copies: Mapping[str, Any]) -> dict[str, int]:
    """Blocks per attention group in an engine's list of copies: pairs of source and destination lists."""
    return {name: len(sources) for name, (sources, _) in copies.items()}


def _to_restore(offloading: Any, batch: Any) -> dict[str, dict[str, int]]:
    """Blocks per request and attention group that the engine is about to bring back from the CPU."""
    tables = {name: allocator.block_table for name, allocator in offloading.cache.cache_allocators.items()}
    return {
        state.request_id: {
            name: min(len(blocks), len(tables[name].get(state.request_id, ())))
            for name, blocks in offloading._request_id_to_cpu_blocks[state.request_id].items()}
        for state in (future.state for future in batch) if state.is_cpu_offloaded}


class PagedHooks:
    """The hooks of one ``TransformersSource``. ``patches`` restores the originals; ``uninstall`` drops the state."""

    def __init__(self, wiring: Wiring, emit: Emit, patches: Patches, names: sessions.Names,
                 turns: sessions.TurnNumbers, actions: PagedActions | None = None) -> None:
        self._bus = wiring.bus
        self._patches, self._actions = patches, actions
        self._events = PagedEvents(Desk(wiring.tracer, emit, names, turns), emit)
        self._reason = "Continuous batching was not imported in this process."
        self._cancel: Callable[[], None] | None = None
        self._epoch = wiring.bus.epoch
        self.cut = 0  # requests that are not told because a pause fell into them

    # -- life ------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Patch the module of continuous batching now or when it is imported; never raises."""
        if self._cancel is None:
            self._cancel = when_imported(_MODULE, self._patch_all)

    def uninstall(self) -> None:
        """Drop all state and end the spans of open requests; wrappers that somebody kept pass through."""
        if self._cancel is not None:
            self._cancel()
            self._cancel = None
        self._bus = Bus(0)
        self._bus.active = False
        self._events.closing_down()

    def availability(self) -> list[Availability]:
        """Whether continuous batching is observed, and why not."""
        return [Availability(SUBJECT, not self._reason, self._reason)]

    def _patch_all(self, api: Any) -> None:
        version = getattr(sys.modules.get("transformers"), "__version__", "of unknown version")
        try:
            points = self._points(api)
            missing = [f"{owner.__name__}.{attribute}" for owner, attribute, _ in points
                       if not hasattr(owner, attribute)]
            if missing:
                raise AttributeError(f"{', '.join(missing)} not found")
            for owner, attribute, make in points:
                self._patches.wrap(owner, attribute, make(f"{owner.__name__}.{attribute}"))
            self._reason = ""
        except Exception as error:
            self._reason = (f"The continuous batching of transformers {version} is not one that kvobs knows "
                            f"(5.18 to 5.24): {error}.")

    def _failed(self, name: str, error: Exception) -> None:
        self._patches.fail(name, error)
        self._reason = f"The hook {name} failed and was detached; continuous batching is observed incompletely."

    # -- ways to hook ----------------------------------------------------------------------------------

    def _before(self, see: See) -> Callable[[str], Make]:
        """Look at a call before it happens."""
        def named(name: str) -> Make:
            def make(original: Original) -> Original:
                def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
                    if self._bus.active:
                        self._see(name, see, owner, None, args, kwargs)
                    return original(owner, *args, **kwargs)
                return call
            return make
        return named

    def _after(self, see: See) -> Callable[[str], Make]:
        """Look at a call that returned."""
        def named(name: str) -> Make:
            def make(original: Original) -> Original:
                def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
                    result = original(owner, *args, **kwargs)
                    if self._bus.active:
                        self._see(name, see, owner, result, args, kwargs)
                    return result
                return call
            return make
        return named

    def _around(self, prepare: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
                see: Callable[[Any, Any, Any], Requests | None]) -> Callable[[str], Make]:
        """Look before a call, and again after it returned with what was seen before."""
        def named(name: str) -> Make:
            def make(original: Original) -> Original:
                def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
                    if not self._bus.active:
                        return original(owner, *args, **kwargs)
                    try:
                        seen = prepare(owner, args, kwargs)
                    except Exception as error:
                        self._failed(name, error)
                        return original(owner, *args, **kwargs)
                    result = original(owner, *args, **kwargs)
                    self._see(name, lambda target, value, _a, _k: see(target, seen, value), owner, result, args, kwargs)
                    return result
                return call
            return make
        return named

    def _see(self, name: str, see: See, owner: Any, result: Any, args: tuple[Any, ...],
             kwargs: dict[str, Any]) -> None:
        began = time.monotonic_ns()
        try:
            self._look_for_pause()
            account = see(owner, result, args, kwargs)
            if account is not None:
                account.hook_ns += time.monotonic_ns() - began
        except Exception as error:
            self._failed(name, error)

    def _look_for_pause(self) -> None:
        """Requests that were open in a pause cannot be told as a whole: they are dropped and counted."""
        if self._bus.epoch != self._epoch:
            self._epoch = self._bus.epoch
            self.cut += self._events.cut()

    # -- hooks with a shape of their own ---------------------------------------------------------------

    def _add_request(self, name: str) -> Make:
        def make(original: Original) -> Original:
            def add_request(manager: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._bus.active:
                    return original(manager, *args, **kwargs)
                try:
                    self._look_for_pause()
                    requests, request = self._events.opening(manager)
                except Exception as error:
                    self._failed(name, error)
                    return original(manager, *args, **kwargs)
                taken = None
                try:
                    taken = original(manager, *args, **kwargs)
                    return taken
                finally:
                    self._events.opened()
                    if taken is None:
                        requests.forget(request)
            return add_request
        return make

    def _generation_step(self, name: str) -> Make:
        def make(original: Original) -> Original:
            def generation_step(processor: Any, *args: Any, **kwargs: Any) -> Any:
                if not self._bus.active:
                    return original(processor, *args, **kwargs)
                began = time.monotonic_ns()
                result = original(processor, *args, **kwargs)
                ended = time.monotonic_ns()
                self._see(name, lambda owner, _, a, k: self._events.stepped(owner, _argument(a, k, 0, "model"), began,
                                                                            ended), processor, result, args, kwargs)
                return result
            return generation_step
        return make

    def _can_store_request_tokens(self, name: str) -> Make:
        def make(original: Original) -> Original:
            def can_store_request_tokens(cache: Any, *args: Any, **kwargs: Any) -> Any:
                fits = original(cache, *args, **kwargs)
                if not fits and self._bus.active and not _argument(args, kwargs, 2, "dry_run"):
                    self._see(name, lambda owner, *_: self._events.refused(owner), cache, fits, args, kwargs)
                return fits
            return can_store_request_tokens
        return make

    def _get_free_blocks(self, name: str) -> Make:
        def make(original: Original) -> Original:
            def get_free_blocks(inner: Any, *args: Any, **kwargs: Any) -> Any:
                blocks = original(inner, *args, **kwargs)
                if blocks and self._bus.active:
                    self._see(name, lambda owner, taken, a, k: self._events.handed_out(
                        owner, _argument(a, k, 0, "index"), len(taken)), inner, blocks, args, kwargs)
                return blocks
            return get_free_blocks
        return make

    def _preparing(self, processor: Any) -> Any:
        if self._actions is not None:
            self._actions.reached(processor)
        return self._events.preparing(processor)

    def _matched(self, cache: Any, request_id: str, tokens: int) -> Requests | None:
        if self._actions is not None:
            self._actions.hot.matched(cache, request_id, tokens)
        return self._events.matched(cache, request_id, tokens)

    # -- the table -------------------------------------------------------------------------------------

    def _points(self, api: Any) -> list[Point]:
        pool = importlib.import_module(f"{_PACKAGE}.cache_allocators").CachePool
        events, processor, manager = self._events, api.ContinuousBatchProcessor, api.ContinuousBatchingManager
        cache, offloading, router = api.PagedAttentionCache, api.OffloadingManager, api.OutputRouter
        before, after, around = self._before, self._after, self._around
        return [
            (manager, "add_request", self._add_request),
            (manager, "_handle_critical_error",
             before(lambda o, _, a, k: events.critical(o, _argument(a, k, 0, "error")))),
            (api.RequestState, "__post_init__", after(lambda o, _, a, k: events.named(o))),
            (processor, "prepare_next_batch", around(lambda o, a, k: self._preparing(o),
                                                     lambda o, _, runs: events.prepared(o, runs))),
            (processor, "_generation_step", self._generation_step),
            (api.ContinuousBatchingIOs, "prepare_batch_update", after(lambda o, r, a, k: events.read(o, r[0]))),
            (processor, "update_batch", after(lambda o, _, a, k: events.updated(o))),
            (processor, "fail_all_requests", after(lambda o, _, a, k: events.all_failed(o))),
            (router, "deliver_batch", before(lambda o, _, a, k: events.delivering(o, _argument(a, k, 0, "outputs")))),
            (router, "fail_and_deliver", before(lambda o, _, a, k: events.failing(
                o, _argument(a, k, 0, "state"), _argument(a, k, 1, "error")))),
            (api.Scheduler, "clear_cancelled_requests", after(lambda o, r, a, k: events.cancelled(o, r))),
            (cache, "__init__", after(lambda o, _, a, k: events.cache_made(o))),
            (cache, "can_store_request_tokens", self._can_store_request_tokens),
            (cache, "search_prefix_match",
             after(lambda o, r, a, k: self._matched(o, _argument(a, k, 0, "request_id"), r))),
            (cache, "prepare_fork_request", around(
                lambda o, a, k: (_argument(a, k, 0, "src_state"), _argument(a, k, 1, "dst_req_ids"),
                                 _argument(a, k, 2, "copy_src_and_dst"),
                                 _source_counts(_argument(a, k, 2, "copy_src_and_dst"))),
                lambda o, s, forked: events.forked(o, s[0], s[1], forked, {
                    name: number - s[3][name] for name, number in _source_counts(s[2]).items()}))),
            (cache, "perform_cache_copy",
             after(lambda o, _, a, k: events.copied(o, _source_counts(_argument(a, k, 0, "copy_src_and_dst"))))),
            (cache, "free_blocks", before(lambda o, _, a, k: events.freeing(o, _argument(a, k, 0, "request_id")))),
            (pool, "get_free_blocks", self._get_free_blocks),
            (offloading, "offload_requests", around(lambda o, a, k: list(o.scheduler.active_requests),
                                                    lambda o, active, _: events.preempted(o, active))),
            (offloading, "_offload_to_cpu", around(
                lambda o, a, k: (time.monotonic_ns(), _argument(a, k, 1, "victim_block_tables")),
                lambda o, s, gone: events.moved(o.cache, str(o.cache.device), "cpu", {
                    request: _block_counts(s[1][request]) for request in gone}, s[0]))),
            (offloading, "restore_scheduled_requests", around(
                lambda o, a, k: (time.monotonic_ns(), _to_restore(o, _argument(a, k, 0, "requests_in_batch"))),
                lambda o, s, _: events.moved(o.cache, "cpu", str(o.cache.device), s[1], s[0]))),
        ]
