"""The entry point of ``opentelemetry-instrument``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import (  # type: ignore[attr-defined, unused-ignore]
    BaseInstrumentor,
)
from packaging.requirements import Requirement

from kvobs import autostart

EXTRA = "instruments"


def supported(distribution: str = "kvobs") -> dict[str, Requirement]:
    """What kvobs can observe, by project name: the extra ``instruments`` of its own metadata.

    Empty where kvobs runs from a source tree that is not installed.
    """
    try:
        texts = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [requirement for requirement in map(Requirement, texts)
             if requirement.marker is not None and requirement.marker.evaluate({"extra": EXTRA})
             and not requirement.marker.evaluate({"extra": ""})]
    return {requirement.name: requirement for requirement in found}


class KvobsInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Arms kvobs: it starts when torch or transformers is imported.

    Settings come from ``KVOBS_*`` or keyword arguments.
    """

    def instrumentation_dependencies(self) -> Collection[str]:
        """The libraries that must be installed in a supported version."""
        return [f"{name} {requirement.specifier}" for name, requirement in supported().items()]

    def _instrument(self, **settings: Any) -> None:
        autostart.arm(settings)  # never raises: that would stop the instrumentors after this one

    def _uninstrument(self, **_: Any) -> None:
        autostart.uninstrument()
