"""vLLM's front end, and what each of its processes is: contexts of requests, spans below vLLM's own, roles.

Hooked are (0.29 and 0.32): ``OutputProcessor.add_request``, through which every request of ``AsyncLLM`` and
``LLMEngine`` goes in its caller's context, complete and not yet sent (each child of ``n > 1``, too);
``Starlette.__call__``, which knows an HTTP request's headers before any task of it begins;
``OutputProcessor.do_tracing``, which writes vLLM's own span; the constructors that say what a process is;
``CoreEngineProcManager.shutdown``, see ``GRACE_S``; and ``EngineCore.shutdown``, which is the last that an engine core
does if its workers hang.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span

from kvobs.model import Availability, Emit, Event, Poll
from kvobs.sources import Wiring
from kvobs.sources._imports import when_imported
from kvobs.sources._patch import Patches
from kvobs.sources.vllm import _children, _roles
from kvobs.sources.vllm._context import PHASES, call_of, headers_of, own_headers, within

_log = logging.getLogger("kvobs")
NAME = "vllm_frontend"
CONTEXTS, CALLERS, SPANS, ENDING = ("vllm request contexts", "vllm http contexts", "vllm request spans",
                                    "vllm shutdown")
# Seconds that an engine core has at least between being asked to end and being killed. vLLM's servers give it none by
# default (``--shutdown-timeout 0``): what it saw last would be lost.
GRACE_S = 2.0

Original = Callable[..., Any]
Make = Callable[[Original], Original]


class FrontEndSource:
    """Observes the processes of a vLLM server beside their engine core's scheduler, once vLLM is imported."""

    name = NAME

    def __init__(self, wiring: Wiring) -> None:
        self._bus = wiring.bus
        self._tracer = wiring.tracer
        self._patches: Patches | None = None
        self._roles: _roles.Roles | None = None
        self._cancels: list[Callable[[], None]] = []
        self._reasons: dict[str, str] = {}
        self._local = threading.local()  # the phases whose parent is being written
        self._flush: Callable[[], None] | None = None

    # -- life ------------------------------------------------------------------------------------------

    def install(self, emit: Emit) -> None:
        """Hook in now, or as soon as the parts of vLLM that are hooked have been imported. Never raises."""
        if self._patches is not None:
            return
        self._patches, self._roles = Patches(NAME, emit), _roles.Roles(emit)
        for module, subject, patch in (
            ("vllm.v1.engine.output_processor", CONTEXTS, self._on_requests),
            ("vllm.v1.engine.output_processor", SPANS, self._on_spans),
            ("vllm.v1.engine.utils", ENDING, self._on_ending),
            ("vllm.v1.engine.core", "", self._on_end),
            ("vllm.v1.engine.async_llm", "", lambda module: self._role(
                module.AsyncLLM, "api_server", lambda config, _, __: _roles.api_server(config.parallel_config))),
            ("vllm.v1.engine.llm_engine", "", lambda module: self._role(
                module.LLMEngine, "llm", lambda config, _, __: ())),
            ("vllm.v1.executor.abstract", "", lambda module: self._role(
                module.Executor, "engine_core", lambda config, _, __: _roles.replica(config.parallel_config))),
            ("vllm.v1.worker.worker_base", "", lambda module: self._role(
                module.WorkerBase, "worker", lambda config, args, kwargs: _roles.worker(
                    config.parallel_config, args[2] if len(args) > 2 else kwargs["rank"]))),
        ):  # a patch may wait for further modules
            self._cancels.append(when_imported(module, self._guarded(subject, patch)))

    def uninstall(self) -> None:
        """Restore what was patched; wrappers that somebody kept pass through."""
        for cancel in self._cancels:
            cancel()
        if self._patches is not None:
            self._patches.restore()
        self._cancels, self._patches, self._roles, self._reasons = [], None, None, {}

    def sample(self, now_ns: int) -> Iterable[Event]:
        """What this process is, and what the engine says of itself where it is asked (``_reported``)."""
        began_ns = time.monotonic_ns()
        events: list[Event] = [self._roles.told] if self._roles is not None and self._roles.told is not None else []
        reported = sys.modules.get("kvobs.sources.vllm._reported")  # imported by vLLM, if at all
        readings = tuple(reported.readings()) if reported is not None else ()
        if readings:
            events.append(Poll(now_ns, NAME, time.monotonic_ns() - began_ns, readings))
        return events

    def availability(self) -> list[Availability]:
        """What of the front end is observed, and why not; nothing where vLLM is not used."""
        return [Availability(subject, not reason, reason) for subject, reason in self._reasons.items()]

    def after_fork_in_child(self) -> None:
        """Another process, another role."""
        if self._patches is not None and self._roles is not None:
            self._patches.after_fork_in_child()
            self._roles.after_fork_in_child()
        self._local = threading.local()

    def ending(self, flush: Callable[[], None]) -> None:
        """Be told how to bring all that was seen to the store and the exporters."""
        self._flush = flush

    def _guarded(self, subject: str, patch: Callable[[Any], None]) -> Callable[[ModuleType], None]:
        def call(module: ModuleType) -> None:
            version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
            try:
                patch(module)
                reason = ""
            except Exception as error:
                reason = f"vLLM {version} is not as kvobs knows it: {type(error).__name__}: {error}."
                _log.warning("kvobs: %s could not be observed (%s); the process is not affected.", module.__name__,
                             reason)
            if subject:
                self._reasons[subject] = reason

        return call

    def _wrap(self, owner: Any, attribute: str, make: Callable[[str], Make]) -> None:
        assert self._patches is not None
        self._patches.wrap(owner, attribute, make(f"{owner.__name__}.{attribute}"))

    def _failed(self, subject: str, name: str, error: Exception) -> None:
        if self._patches is not None:
            self._patches.fail(name, error)
        if subject:
            self._reasons[subject] = f"The hook {name} failed and was detached."

    # -- contexts --------------------------------------------------------------------------------------

    def _on_requests(self, module: Any) -> None:
        self._wrap(module.OutputProcessor, "add_request", self._adding)
        self._cancels.append(when_imported("starlette.applications", self._guarded(
            CALLERS, lambda applications: self._wrap(applications.Starlette, "__call__", self._calling))))

    def _adding(self, name: str) -> Make:
        def make(original: Original) -> Original:
            def add_request(processor: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
                if self._bus.active:
                    try:
                        request.trace_headers = headers_of(request.trace_headers, tracing=processor.tracing_enabled)
                    except Exception as error:
                        self._failed(CONTEXTS, name, error)
                return original(processor, request, *args, **kwargs)
            return add_request
        return make

    def _calling(self, name: str) -> Make:
        def make(original: Original) -> Original:
            async def call(application: Any, scope: Any, receive: Any, send: Any) -> Any:
                found = self._call_of(name, scope) if self._bus.active else None
                if found is None:
                    return await original(application, scope, receive, send)
                with within(found):
                    return await original(application, scope, receive, send)
            return call
        return make

    def _call_of(self, name: str, scope: Any) -> Context | None:
        try:
            return call_of(scope["headers"]) if scope["type"] == "http" else None
        except Exception as error:
            self._failed(CALLERS, name, error)
            return None

    # -- spans -----------------------------------------------------------------------------------------

    def _on_spans(self, module: Any) -> None:
        otel = importlib.import_module("vllm.tracing.otel")
        writing = _children.showing(otel.manual_instrument_otel, self._seen)
        self._wrap(module.OutputProcessor, "do_tracing", self._tracing)

        def make(original: Original) -> Original:
            def instrument_manual(*args: Any, **kwargs: Any) -> Any:
                waiting = getattr(self._local, "phases", None) is not None
                return (writing if waiting else original)(*args, **kwargs)
            return instrument_manual

        assert self._patches is not None
        self._patches.wrap(module, "instrument_manual", make)

    def _tracing(self, name: str) -> Make:
        def make(original: Original) -> Original:
            def do_tracing(processor: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
                local = self._local
                try:
                    text = (output.trace_headers or {}).get(PHASES)
                    output.trace_headers = own_headers(output.trace_headers)
                    local.phases = _children.told(text) if text and self._bus.active else None
                except Exception as error:
                    self._failed(SPANS, name, error)
                    local.phases = None
                try:
                    return original(processor, output, *args, **kwargs)
                finally:
                    local.phases = None
            return do_tracing
        return make

    def _seen(self, span: Span) -> None:
        """The engine has started the span of the request whose phases wait."""
        phases = self._local.phases
        try:
            _children.write(self._tracer(), span, phases, time.time_ns())
        except Exception as error:
            self._failed(SPANS, "OutputProcessor.do_tracing", error)

    # -- processes -------------------------------------------------------------------------------------

    def _role(self, owner: Any, role: str, ranks: Callable[[Any, tuple[Any, ...], dict[str, Any]], _roles.Ranks]
              ) -> None:
        """Every constructor here is given the ``VllmConfig`` first."""
        def named(name: str) -> Make:
            def make(original: Original) -> Original:
                def construct(self_: Any, *args: Any, **kwargs: Any) -> Any:
                    try:
                        config = args[0] if args else kwargs["vllm_config"]
                        if self._roles is not None:
                            self._roles.found(role, ranks(config, args, kwargs))
                    except Exception as error:
                        self._failed("", name, error)
                    return original(self_, *args, **kwargs)
                return construct
            return make

        self._wrap(owner, "__init__", named)

    def _on_ending(self, module: Any) -> None:
        def named(name: str) -> Make:
            def make(original: Original) -> Original:
                def shutdown(manager: Any, timeout: float | None = None) -> Any:
                    grace = timeout if timeout is None or not self._bus.active else max(timeout, GRACE_S)
                    return original(manager, timeout=grace)
                return shutdown
            return make

        self._wrap(module.CoreEngineProcManager, "shutdown", named)

    def _on_end(self, module: Any) -> None:
        def named(name: str) -> Make:
            def make(original: Original) -> Original:
                def shutdown(core: Any, *args: Any, **kwargs: Any) -> Any:
                    if self._bus.active and self._flush is not None:
                        # Beside the engine's own end, which waits for its workers and may be cut short.
                        with contextlib.suppress(RuntimeError):  # no thread begins while the interpreter ends
                            threading.Thread(target=self._flush, name="kvobs-flush", daemon=True).start()
                    return original(core, *args, **kwargs)
                return shutdown
            return make

        self._wrap(module.EngineCore, "shutdown", named)
