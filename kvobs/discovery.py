"""Where Prometheus finds the endpoints of all processes of a server: a file per process, for ``file_sd_configs``.

An engine of several processes serves one endpoint per process, most of them on ports that were free. Each process
keeps ``prometheus-targets/<process>.json`` in the directory of the stores::

    file_sd_configs:
      - files: ["DIRECTORY/prometheus-targets/*.json"]

It is replaced whole (readers never see half of one), and its owner holds an flock on a file beside it, so that
whoever comes by can tell and remove what a killed process left, whatever its process id has become since. Nobody
waits for anybody: no file is shared by two writers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from pathlib import Path
from urllib.parse import urlsplit

from kvobs.model import ProcessRole

_log = logging.getLogger("kvobs")
DIRECTORY = "prometheus-targets"
SWEEP_NS = 5_000_000_000


def entry(endpoint: str, process: str, role: ProcessRole | None) -> str:
    """The file of one process: Prometheus's JSON for file-based discovery.

    Its labels come to every series of the process, so none is named as a label of a metric is.
    """
    labels = {"kvobs_process": process, "kvobs_pid": str(os.getpid())}
    if role is not None:
        labels |= {"kvobs_engine": role.engine, "kvobs_role": role.role,
                   "kvobs_ranks": " ".join(f"{kind}={rank}" for kind, rank in role.ranks)}
    return json.dumps([{"targets": [urlsplit(endpoint).netloc], "labels": labels}], indent=1) + "\n"


class Targets:
    """This process's entry. One thread at a time may call; nothing raises, a failure is logged once."""

    def __init__(self, directory: Path, process: str, endpoint: str) -> None:
        self._directory = directory / DIRECTORY
        self._path = self._directory / f"{process}.json"
        self._process, self._endpoint = process, endpoint
        self._lock: int | None = None
        self._written = ""
        self._swept_ns: int | None = None
        self._failing = False

    def keep(self, now_ns: int, role: ProcessRole | None) -> None:
        """Have the entry say what is known now, and now and then remove those of dead processes."""
        try:
            if self._lock is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._lock = _taken(self._path)
            text = entry(self._endpoint, self._process, role)
            sweep = self._swept_ns is None or now_ns - self._swept_ns >= SWEEP_NS
            if text != self._written or (sweep and not self._path.exists()):
                _replace(self._path, text)
                self._written = text
            if sweep:
                self._swept_ns = now_ns
                _sweep(self._directory)
            self._failing = False
        except OSError as error:
            if not self._failing:
                self._failing = True
                _log.warning("kvobs: the targets for Prometheus in %s cannot be kept (%s).", self._directory, error)

    def close(self) -> None:
        """Remove the entry, since the endpoint is not served any more, and those of processes that are gone by now.

        A server ends after the processes it started: if it was the last of the directory, nobody would come by.
        """
        if self._lock is not None:
            _remove(self._path)
            os.close(self._lock)
            self._lock = None
            _sweep(self._directory)

    def abandon(self) -> None:
        """In a forked child: the entry is the parent's."""
        if self._lock is not None:
            os.close(self._lock)  # a copy: the lock is the parent's as long as its own is open
            self._lock = None


def _beside(path: Path) -> Path:
    return path.with_suffix(".lock")


def _taken(path: Path) -> int:
    """The lock of an entry, which is new."""
    descriptor = os.open(_beside(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:
            raise OSError("somebody has just taken it for a dead process's")  # the next call makes a new one
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _remove(path: Path) -> None:
    for one in (path, path.with_suffix(".new"), _beside(path)):
        with contextlib.suppress(OSError):
            one.unlink()


def _sweep(directory: Path) -> None:
    """Remove the entries of processes that are gone."""
    for lock in directory.glob("*.lock"):
        try:
            descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            _remove(lock.with_suffix(".json"))
        except OSError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
