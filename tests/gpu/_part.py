"""One part of the script, in a process of its own: what it does on the device, and the two files that it leaves."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import _graphs, _model, _oom, _serving, _streams
from tests.gpu._device import Device, NoDevice
from tests.gpu._observed import Observed

RESULT, SNAPSHOT = "result.json", "snapshot.pickle"
ABOUT = "about"
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class Part:
    """A part: its allocator settings, whether it loads the model, and how many seconds it may take with its replay."""

    name: str
    seconds: float
    conf: str = ""
    model: bool = True
    graphs: bool = False


# The most important ones first: what the script's total does not reach is told, and not begun.
PARTS = (Part("default", 80), Part("oom", 80), Part("expandable", 80, EXPANDABLE), Part("streams", 40, model=False),
         Part("graph-plain", 40, model=False, graphs=True), Part("graph-model", 60, graphs=True))
ABOUT_SECONDS = 60.0  # the first import of torch on a cold machine
BY_NAME = {part.name: part for part in PARTS}


@dataclass(frozen=True)
class Asked:
    """What the command line says of a part. ``soft`` is the moment at which it should come to its end."""

    part: Part
    kind: str
    work: Path
    soft: float
    model: Path | None
    tiny: bool
    observed: bool


def run(asked: Asked) -> int:
    """Do the part and write its result: 0, or 1 with ``skipped`` or ``failed`` in the result."""
    try:
        told = _run(asked)
    except (NoDevice, _graphs.NoGraphs) as error:
        told = {"skipped": str(error)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        told = {"failed": _shown(error)}
    if "failed" in told and (asked.work / RESULT).exists():
        told = json.loads((asked.work / RESULT).read_text(encoding="utf-8")) | told
    _write(asked.work, told)
    return 1 if "skipped" in told or "failed" in told else 0


def about(kind: str, work: Path) -> int:
    """Versions, device, driver and settings."""
    try:
        told = Device(kind).about()
    except NoDevice as error:
        told = {"skipped": str(error)}
    _write(work, told)
    return 1 if "skipped" in told else 0


def _write(work: Path, told: dict[str, Any]) -> None:
    """The result so far, whole at any moment; less what only keeps memory in use."""
    figures = {name: value for name, value in told.items() if name not in ("keep", "again", "seen")}
    unfinished = work / f"{RESULT}.new"
    unfinished.write_text(json.dumps(figures), encoding="utf-8")
    unfinished.replace(work / RESULT)


def _run(asked: Asked) -> dict[str, Any]:
    part, observed = asked.part, Observed(asked.work / "store", asked.observed)
    device = Device(asked.kind, part.conf)
    if part.graphs:
        _graphs.refuse_without_graphs(device)
    device.record()
    served = _model.load(device.device, asked.model, asked.tiny) if part.model else None
    _say(asked, f"the model is there: {served.what}" if served else "no model is needed")
    told = _program(asked, device, served, observed)
    stats = device.dump(asked.work / SNAPSHOT)
    _say(asked, f"dumped {(asked.work / SNAPSHOT).stat().st_size / 1e6:,.1f} MB")
    told |= observed.metrics(stats, device.name, part.conf) | {"stats": stats, "model": served.what if served else None}
    told["quiet"] = stats == device.stats()
    _write(asked.work, told)  # what follows may fail or hang
    if part.name == "oom" and served is not None:
        told["without_history"] = _oom.again_without_history(device, served, observed, told)
    observed.close()
    return told


def _program(asked: Asked, device: Device, served: Any, observed: Observed) -> dict[str, Any]:
    name = asked.part.name
    if name == "streams":
        return _streams.interleave(device)
    if name == "graph-plain":
        return _graphs.plain_step(device)
    if name == "graph-model":
        return _graphs.model_step(device, served)
    if name == "oom":
        return _oom.exhaust(device, served, asked.tiny)
    return _serving.serve(device, served, observed, asked.soft, _sayer(asked))


def _sayer(asked: Asked) -> Callable[[str], None]:
    return lambda text: _say(asked, text)


def _say(asked: Asked, text: str) -> None:
    print(f"  {asked.part.name}: {text} ({max(asked.soft - time.monotonic(), 0):.0f} s left)", flush=True)


def _shown(error: BaseException) -> str:
    """The error without directories: figures are published."""
    text = f"{type(error).__name__}: {error}"
    for path in (*sys.path, str(Path.home())):
        text = text.replace(path, "…") if len(path) > 1 else text
    return text[:600]
