"""The entry point ``vllm.endpoint_plugins``: ``GET /kvobs`` on vLLM's own HTTP server.

vLLM loads it only where ``VLLM_PLUGINS`` names it. It reads the store and changes nothing; it knows no prompts and no
token ids, and session ids are as the setting ``session_ids`` shows them.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from kvobs import config
from kvobs.store import StoreError, StoreReader, requests

PATH = "/kvobs"
ROLE = "kvobs.process.role"
LATELY_NS = 10_000_000_000
OFF = "The store of this server is off (setting store), so nothing can be read."


class KvobsEndpoints:
    """What vLLM expects of such a plugin (``EndpointPlugin``)."""

    name = "kvobs"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Serve ``GET /kvobs``; reading a store takes milliseconds, so it runs in FastAPI's thread pool."""
        def state_of_the_server() -> dict[str, Any]:
            return document(_directory())

        app.add_api_route(PATH, state_of_the_server, methods=["GET"], name="kvobs")

    async def init_state(self, engine_client: object, state: object, args: object) -> None:
        """Nothing of the engine is needed."""


def document(directory: Path | None) -> dict[str, Any]:
    """What ``GET /kvobs`` answers: the live processes of this process's group, and who is in their engines.

    Processes of one server are started by one command, so that they are of one process group. Times are Unix
    nanoseconds, ages seconds: a request's since it was told (once a second), a process's since its last sign of life in
    the store. What is not known is null.
    """
    answer: dict[str, Any] = {"processes": [], "requests": [], "reason": OFF if directory is None else ""}
    if directory is None:
        return answer
    try:
        ours = {found.process: found for found in StoreReader(directory).processes()
                if found.alive and found.host == socket.gethostname() and _together(found.pid)}
        reader, now = StoreReader(directory, list(ours)), time.time_ns()
        roles = {point.process: point.attributes
                 for point in reader.points(ROLE, since_wall_ns=now - LATELY_NS)}
        answer["processes"] = [
            {"pid": found.pid, "alive": found.alive, "heartbeat_age_s": _age_s(now, found.heartbeat_wall_ns),
             "endpoint": found.endpoint,
             **{name: roles.get(process, {}).get(name) for name in ("engine", "role", "ranks")}}
            for process, found in sorted(ours.items(), key=lambda item: item[1].pid or 0)]
        answer["requests"] = [
            {"pid": ours[found.process].pid, "wall_ns": found.wall_ns, "age_s": _age_s(now, found.wall_ns),
             **msgspec.to_builtins(found.record)}
            for found in requests(reader)]
    except StoreError as error:
        answer["reason"] = str(error)
    return answer


def _age_s(now_ns: int, wall_ns: int | None) -> float | None:
    return None if wall_ns is None else max(0, now_ns - wall_ns) / 1e9


def _directory() -> Path | None:
    """Where this process's store is, as its environment says."""
    try:
        return config.load().store
    except config.ConfigError:
        return None  # then this process is not observed, and has said why


def _together(pid: int | None) -> bool:
    """Whether a process of this machine is of our process group."""
    try:
        return pid is not None and os.getpgid(pid) == os.getpgid(0)
    except OSError:
        return False
