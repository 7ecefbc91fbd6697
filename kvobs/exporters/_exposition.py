"""The two text formats of a scrape, and which one a client asked for.

The bytes are those of prometheus_client's own encoders (a test compares them), in a fourth of their time: theirs
take the interpreter lock for more than 20 ms with eight devices, which an engine would feel at every scrape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString as _go_string

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def number(value: float) -> str:
    """A number as Go, and so Prometheus, writes it."""
    if type(value) is int and 0 <= value < 1_000_000:  # bucket counts: most of a scrape
        return f"{value}.0"
    text: str = _go_string(value)  # type: ignore[no-untyped-call]
    return text


def wants_openmetrics(accept: str) -> bool:
    """Whether an ``Accept`` header prefers OpenMetrics to the text format; without a word on it, it does not."""
    openmetrics = _quality(accept, "application/openmetrics-text")
    return openmetrics > 0 and openmetrics >= _quality(accept, "text/plain")


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an ``Accept-Encoding`` header admits gzip."""
    return _quality(accept_encoding, "gzip") > 0


def _quality(header: str, wanted: str) -> float:
    """The best q that a comma-separated header gives to ``wanted``, 0 where it is not named."""
    best = 0.0
    for item in header.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name != wanted:
            continue
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        best = max(best, quality)
    return best


def encode(families: Iterable[Metric], *, openmetrics: bool) -> bytes:
    """The families in OpenMetrics 1.0 (with exemplars) or in the text format 0.0.4 (which has none)."""
    lines: list[str] = []
    for family in families:
        name, kind = family.name, family.type
        documentation = _escape(family.documentation, quotes=openmetrics)
        if not openmetrics:
            name += {"counter": "_total", "info": "_info"}.get(kind, "")
            kind = "gauge" if kind == "info" else kind
        lines.append(f"# HELP {name} {documentation}\n# TYPE {name} {kind}\n")
        if openmetrics and family.unit:
            lines.append(f"# UNIT {name} {family.unit}\n")
        for sample in family.samples:
            exemplar = _exemplar(sample.exemplar) if openmetrics and sample.exemplar else ""
            labels = sample.labels
            text = labels.text if type(labels) is Labels else _rendered(labels)
            lines.append(f"{sample.name}{text} {number(sample.value)}{exemplar}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode("utf-8", "backslashreplace")  # a name may hold bytes that are no text


class Labels(dict[str, str]):
    """A series' labels that know their text: the same series come back at every scrape. Never changed once made."""

    __slots__ = ("text",)

    def __init__(self, names: Iterable[str], values: Iterable[str], **more: str) -> None:
        super().__init__(zip(names, values, strict=True), **more)
        self.text = _rendered(self)


def _rendered(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join([f'{key}="{_escape(value)}"' for key, value in sorted(labels.items())]) + "}"


def _exemplar(exemplar: Exemplar) -> str:
    stamp = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    labels = ",".join([f'{key}="{_escape(exemplar.labels[key])}"' for key in sorted(exemplar.labels)])
    return f" # {{{labels}}} {number(exemplar.value)}{stamp}"


def _escape(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text
