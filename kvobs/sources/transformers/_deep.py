"""Deep sampling: attention, layers and cache updates of some decode steps, inside the overhead that is allowed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvobs.bus import Bus
from kvobs.model import Attention, Availability, CacheUpdates, Origin
from kvobs.sources._patch import Patches
from kvobs.sources.transformers._attention import AttentionProbe
from kvobs.sources.transformers._caches import CacheRecord
from kvobs.sources.transformers._cadence import SHARE, Cadence, Place
from kvobs.sources.transformers._layers import layers_of
from kvobs.sources.transformers._local import Local
from kvobs.sources.transformers._sample import ATTENTION, PassSample
from kvobs.sources.transformers._turns import LiveTurn
from kvobs.spans import layer_spans

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

Function = Callable[..., Any]
_MODELS = 64


class DeepState:
    """What is kept of one cache between its sampled steps."""

    __slots__ = ("place", "probe", "quantized")

    def __init__(self, layers: Iterable[Any]) -> None:
        self.place, self.probe = Place(), AttentionProbe()
        self.quantized = any(hasattr(layer, "_quantized_keys") for layer in layers)


class Deep:
    """Decides what is sampled, wraps the two places where it shows, and tells it."""

    def __init__(self, bus: Bus, patches: Patches, local: Local, tracer: Callable[[], Tracer],
                 shown: Callable[[str], str], overhead_percent: float, is_compiling: Callable[[], bool]) -> None:
        self._bus, self._patches, self._local, self._tracer, self._shown = bus, patches, local, tracer, shown
        self._budget = SHARE * overhead_percent / 100
        self._is_compiling = is_compiling
        self._broken = False
        self._missing = ""
        self._cadences: dict[str, Cadence] = {}
        self._sampled: set[str] = set()
        self._reasons: dict[str, str] = {}

    # -- the two places --------------------------------------------------------------------------------

    def interface(self, original: Function) -> Function:
        """Around ``AttentionInterface.get_interface``: in a sampled pass the function it gives is looked at."""
        local, is_compiling = self._local, self._is_compiling

        def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
            function = original(self, *args, **kwargs)
            if is_compiling():
                return function
            sample = local.sample
            if sample is None:
                return function
            name = args[0] if args else kwargs.get("attn_implementation")
            return sample.attending(function, str(name))

        return get_interface

    def update(self, original: Function) -> Function:
        """Around ``Cache.update``: timed in a sampled pass."""
        local, is_compiling = self._local, self._is_compiling

        def update(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(self, *args, **kwargs)
            sample = local.sample
            if sample is None:
                return original(self, *args, **kwargs)
            return sample.updating(original, self, args, kwargs)

        return update

    # -- a pass ----------------------------------------------------------------------------------------

    def begins(self, record: CacheRecord, length: int, *, compiled: bool) -> PassSample | None:
        """A forward pass over a followed cache begins; what collects in it, where it is to be sampled."""
        if not self._bus.deep or self._broken or length != 1 or record.blind or record.origin is None:
            return None
        if compiled:
            self._note(record.model, "compiled decoding never asks for an attention function")
            return None
        state = record.deep
        if state is None:
            state = record.deep = DeepState(record.layers() or ())
        if state.quantized:
            self._note(record.model, "its cache is quantized, and what one of its tokens takes is not known")
            return None
        if not state.place.due(self._cadence(record.model).every):
            return None
        state.probe.begin(record.sweep.length() + 1, state.place.consecutive())
        return PassSample(state.probe, self._fail)

    def cannot(self, model: str, cache: Any) -> None:
        """A forward pass that is not followed: it keeps no cache, or one without layers."""
        if cache is None:
            self._note(model, "its forward passes keep no cache")
        else:
            self._note(model, f"a {type(cache).__name__} has no layers of its own to look at")

    def without_interface(self, version: str) -> None:
        """This transformers has no place where an attention function could be looked at."""
        self._missing = f"transformers {version} is older than the attention interface that kvobs looks at."

    def ends(self, sample: PassSample, record: CacheRecord, origin: Origin, turn: LiveTurn | None, now_ns: int,
             step_ns: int) -> None:
        """The pass is over and its cache was swept: tell what was seen. ``step_ns`` is the pass without sampling."""
        began = time.monotonic_ns()
        cadence = self._cadence(record.model)
        try:
            found = sample.probe.end() if sample.probe is not None and sample.seen else None
            self._remember(sample, record.model)
            spent = sample.spent_ns + time.monotonic_ns() - began
            session, number = record.session, record.turns
            for kind, sums in (found or {}).items():
                self._bus.publish(Attention(now_ns, spent, origin, record.id, self._shown(session), number, kind,
                                            cadence.every, *sums))
                spent = 0
            self._tell_updates(sample, record, origin, now_ns)
            if turn is not None and turn.opened is not None and not turn.layered and sample.calls:
                turn.layered = True
                layer_spans(self._tracer(), turn.opened.span, turn.wall_start_ns - turn.start_ns, sample.calls,
                            dict(sample.updates))
        except Exception as error:
            self._fail("AttentionInterface.get_interface", error)
        cadence.took(sample.spent_ns + time.monotonic_ns() - began, step_ns)

    def availability(self) -> Availability:
        """Whether attention is sampled in this process, and why not (for every model)."""
        told = "; ".join(f"{model}: {reason}" for model, reason in list(self._reasons.items())
                         if model not in self._sampled)
        if self._missing:
            return Availability(ATTENTION, False, self._missing)
        if self._broken:
            return Availability(ATTENTION, False, "A hook of deep sampling failed and was detached.")
        if self._sampled:
            return Availability(ATTENTION, True, f"Not sampled: {told}." if told else "")
        return Availability(ATTENTION, False, f"Not sampled: {told}." if told else "No decode step was sampled yet.")

    # -- inside ----------------------------------------------------------------------------------------

    def _cadence(self, model: str) -> Cadence:
        found = self._cadences.get(model)
        if found is None:
            if len(self._cadences) >= _MODELS:
                return next(iter(self._cadences.values()))
            found = self._cadences[model] = Cadence(self._budget)
        return found

    def _fail(self, name: str, error: Exception) -> None:
        self._broken = True
        self._patches.fail(name, error)

    def _note(self, model: str, reason: str) -> None:
        if model in self._reasons or len(self._reasons) < _MODELS:
            self._reasons[model] = reason

    def _remember(self, sample: PassSample, model: str) -> None:
        if sample.seen:
            if len(self._sampled) < _MODELS:
                self._sampled.add(model)
        elif sample.reason:
            self._note(model, sample.reason)
        elif not sample.calls:
            self._note(model, "its attention does not go through the attention interface of transformers")

    def _tell_updates(self, sample: PassSample, record: CacheRecord, origin: Origin, now_ns: int) -> None:
        if not sample.updates:
            return
        cache = record.ref() if record.ref is not None else None
        layers = layers_of(cache) if cache is not None else None
        kinds: dict[str, list[int]] = {}
        for index, duration in sample.updates:
            layer = layers[index] if layers is not None and index < len(layers) else None
            kinds.setdefault("sliding" if getattr(layer, "is_sliding", False) else "full", []).append(duration)
        for kind, durations in kinds.items():
            self._bus.publish(CacheUpdates(now_ns, origin, record.id, kind, tuple(durations)))
