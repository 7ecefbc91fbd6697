"""The entry point ``vllm.general_plugins``: vLLM calls it in every process of a server, before its engine exists."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping

from kvobs import autostart, config

# A process of seconds, in which vLLM looks at a model's class: nothing happens there that anybody wants to see.
INSPECTION = "vllm.model_executor.models.registry"
ENGINE_CORE = "EngineCore"  # how vLLM's processes with a scheduler are named


def general() -> None:
    """Observe this process as its environment says (``KVOBS_*``). Safe to call again; never raises."""
    main = sys.modules.get("__main__")
    if getattr(getattr(main, "__spec__", None), "name", "") != INSPECTION:
        autostart.arm(settings(multiprocessing.current_process().name, os.environ))


def settings(process: str, environ: Mapping[str, str]) -> dict[str, object]:
    """What differs in this process: the configured port is for the engine core, which has the pool and the requests.

    The first one takes it (an engine in process has its engine core in it); the front end and workers take free ones.
    """
    if process.startswith(ENGINE_CORE) or environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        return {}
    try:
        endpoint = config.load(environ).prometheus
    except config.ConfigError:
        return {}  # arming says so
    if endpoint is None:
        return {}
    host = f"[{endpoint[0]}]" if ":" in endpoint[0] else endpoint[0]
    return {"prometheus": f"{host}:0"}
