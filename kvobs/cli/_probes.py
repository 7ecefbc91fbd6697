"""The questions of ``kvobs doctor``; each answers with a whole sentence and changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from kvobs import __version__
from kvobs.catalog import BY_NAME
from kvobs.cli._engines import engines
from kvobs.cli._profile_facts import profile
from kvobs.config import Config
from kvobs.model import Availability, Poll, Source
from kvobs.slo import refusals

_TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_METRICS = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
_ALL = "OTEL_EXPORTER_OTLP_ENDPOINT"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def probe(config: Config, environ: Mapping[str, str] = os.environ,
          origins: Mapping[str, str] | None = None) -> list[Availability]:
    """Everything, in the order in which a reader would fix it. ``origins`` say where the settings came from."""
    from kvobs.instrumentor import supported
    from kvobs.sources._host import HostSource
    from kvobs.sources._nvml import NvmlSource

    needed = supported()
    findings = [
        Availability("python", True, f"kvobs {__version__} runs under Python {platform.python_version()}."),
        *(library(name, needed.get(name), "torch") for name in ("torch", "transformers")),
        *engines(environ),
        *polled(NvmlSource()),
        *polled(HostSource()),
        virtual_gpu(),
        library("opentelemetry-sdk", None, "otel"),
        *otlp(config, environ),
        library("prometheus-client", None, "prometheus"),
        metrics_endpoint(config),
        store(config),
        *profile(config, {} if origins is None else origins, environ),
        *(Availability(f"objective {one.name}", True, one.sentence) for one in config.objectives),
        *refusals(config.objectives),
    ]
    if not config.enabled:
        findings.insert(0, Availability("kvobs", False, "The setting 'enabled' is off, so nothing is observed."))
    return findings


def virtual_gpu() -> Availability:
    """Whether a virtual GPU can be had; nothing is compiled for the answer."""
    from kvobs import virtual

    reason = virtual.why_not(build=False)
    if reason is not None:
        return Availability("virtual GPU", False, reason)
    how = "is compiled" if virtual.compiled() else "will be compiled at its first use"
    return Availability("virtual GPU", True, f"It {how}: kvobs run --virtual-gpu 24GiB -- python serve.py.")


def library(name: str, needed: Requirement | None, extra: str) -> Availability:
    """Whether a project is installed, in a version that kvobs supports."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Availability(name, False, f"It is not installed; pip install 'kvobs[{extra}]' brings it.")
    if needed is None:
        return Availability(name, True, f"Version {version} is installed.")
    supported = needed.specifier.contains(version, prereleases=True)
    return Availability(name, supported, f"Version {version} is installed; {needed.specifier} is supported.")


def polled(source: Source) -> list[Availability]:
    """What a polled source can read here, by reading it once."""
    source.install(lambda _: None)
    try:
        readings = [reading for event in source.sample(time.monotonic_ns()) if isinstance(event, Poll)
                    for reading in event.readings]
        facts = list(source.availability())
    finally:
        source.uninstall()
    names = sorted({dict(zip(BY_NAME[name].attributes, values, strict=True)).get("hw.name", "")
                    for name, values, _ in readings} - {""})
    read = f"It can be read here ({', '.join(names)})." if names else "It can be read here."
    return [Availability(fact.subject, fact.available, fact.reason or read) for fact in facts]


def otlp(config: Config, environ: Mapping[str, str]) -> Iterator[Availability]:
    """Where spans and metrics would be pushed, and whether somebody accepts connections there."""
    for signal, variable in (("traces", _TRACES), ("metrics", _METRICS)):
        subject = f"otlp {signal}"
        url = environ.get(variable) or environ.get(_ALL)
        if config.otlp == "off":
            yield Availability(subject, False, "The setting 'otlp' is off.")
        elif url:
            yield _reachable(subject, url)
        elif config.otlp == "auto":
            yield Availability(subject, False, f"No endpoint is configured; set {_ALL}, or global providers in code.")
        else:
            grpc = environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc") == "grpc"
            yield _reachable(subject, f"http://localhost:{4317 if grpc else 4318}")


def _reachable(subject: str, url: str) -> Availability:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = parts.hostname, parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        host = port = None
    if host is None or port is None:
        return Availability(subject, False, f"The endpoint {url!r} names no host and port.")
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError as error:
        return Availability(subject, False, f"Nobody accepts connections at {host}:{port} ({_reason(error)}).")
    return Availability(subject, True, f"The endpoint {host}:{port} accepts connections.")


def metrics_endpoint(config: Config) -> Availability:
    """Whether the address of the metrics page is free."""
    if config.prometheus is None:
        return Availability("prometheus", False, "The setting 'prometheus' is off.")
    host, port = config.prometheus
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM,
                                                      flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return Availability("prometheus", True, f"The address {host}:{port} cannot be served ({_reason(error)}); "
                                                "the next process takes a free port instead and says so.")
    return Availability("prometheus", True, f"The address {host}:{port} is free for /metrics.")


def store(config: Config) -> Availability:
    """Whether stores can be written in the configured directory."""
    if config.store is None:
        return Availability("store", False, "The setting 'store' is off.")
    existing = _nearest(config.store)
    if not existing.is_dir():
        return Availability("store", False, f"{existing} is not a directory, so {config.store} cannot be used.")
    if not os.access(existing, os.W_OK | os.X_OK):
        return Availability("store", False, f"The directory {existing} is not writable.")
    return Availability("store", True, f"Stores are written in {config.store}.")


def _nearest(path: Path) -> Path:
    path = path.absolute()
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
