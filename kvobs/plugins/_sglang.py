"""The entry point ``sglang.srt.plugins``: SGLang calls it in each of its processes before it starts."""

from __future__ import annotations

from kvobs import autostart
from kvobs.sources.sglang import through_registry


def plugin() -> None:
    """Observe this process as its environment says (``KVOBS_*``). Safe to call again; never raises.

    What kvobs hooks while it starts here goes into SGLang's hook registry, which SGLang applies right after its
    plugins. Where kvobs ran before (``kvobs run``, ``kvobs.instrument()``), its own patches are in place and stay.
    """
    with through_registry():
        autostart.arm()
