"""The entry point of the group ``sglang.srt.plugins``: SGLang calls it in each of its processes before it starts."""

from __future__ import annotations

import importlib

from kvobs.sources.sglang import _hooking


def plugin() -> None:
    """Start kvobs in this process with the environment's settings; may be called again, and never raises.

    What kvobs hooks while it starts here goes into SGLang's hook registry, which SGLang applies right after its
    plugins. Where kvobs ran before (``kvobs run``, ``kvobs.instrument()``), its own patches are in place and stay.
    """
    try:
        with _hooking.through_registry():
            # The plugin is an entry like the command line, above the sources; hence not an import of this layer.
            importlib.import_module("kvobs.autostart").arm()
    except Exception as error:
        import logging

        logging.getLogger("kvobs").warning(
            "kvobs: this SGLang process is not observed (%s: %s); the process is not affected.",
            type(error).__name__, error)
