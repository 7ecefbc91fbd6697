"""The entry point ``vllm.general_plugins``: vLLM calls it in every process of a server, before its engine exists."""

from __future__ import annotations

import sys

from kvobs import autostart

# A process of seconds, in which vLLM looks at a model's class: nothing happens there that anybody wants to see.
INSPECTION = "vllm.model_executor.models.registry"


def general() -> None:
    """Observe this process as its environment says (``KVOBS_*``). Safe to call again; never raises."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", "") != INSPECTION:
        autostart.arm()
