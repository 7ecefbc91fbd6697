"""The entry point ``vllm.general_plugins``: vLLM calls it in every process of a server, before its engine exists."""

from __future__ import annotations

from kvobs import autostart


def general() -> None:
    """Observe this process as its environment says (``KVOBS_*``). Safe to call again; never raises."""
    autostart.arm()
