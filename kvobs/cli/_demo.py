"""``kvobs demo``: a real small model and what its KV caches did; a scripted incident of known truth; or a real vLLM."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from kvobs.cli._errors import Refused

_NEEDED = ("torch", "transformers", "gguf", "accelerate")
_SCENARIO = ("torch", "transformers")
_LONGEST_HOLD_S = 86_400


def demo(turns: Annotated[int, typer.Option(help="How many turns the main conversation has.")] = 8,
         as_json: Annotated[bool, typer.Option("--json", help="One JSON object per turn on stdout.")] = False,
         deep: Annotated[bool, typer.Option("--deep", help="Also sample attention (see the live view).")] = False,
         device: Annotated[str, typer.Option(help="vgpu, cpu, or auto for the first that can be had.")] = "auto",
         scenario: Annotated[str | None, typer.Option(
             help="A scripted incident of known truth instead: fragmentation, oom, migration or leak.",
             show_default=False)] = None,
         hold: Annotated[float, typer.Option(help="After a scenario, go on serving metrics for so many seconds.",
                                             min=0, max=_LONGEST_HOLD_S)] = 0,
         engine: Annotated[str | None, typer.Option(
             help="vllm: sessions in a real vLLM on this CPU, which needs an environment of its own.",
             show_default=False)] = None,
         engine_env: Annotated[Path | None, typer.Option(
             help="Where that environment is, or shall be; the default is in the user's cache.",
             show_default=False)] = None,
         yes: Annotated[bool, typer.Option("--yes", help="Make that environment without asking.")] = False) -> int:
    """Observe real conversations with a small model, on a virtual GPU or on this machine's CPU."""
    if engine not in (None, "vllm"):
        raise Refused(f"--engine: {engine!r} is not known; allowed is vllm.")
    if engine is None and (yes or engine_env is not None):
        raise Refused("--yes and --engine-env belong to --engine vllm.")
    if engine is not None and (scenario, device, turns, deep, hold) != (None, "auto", 8, False, 0):
        raise Refused("Beside --engine vllm only --engine-env, --yes and --json are allowed.")
    if missing := [name for name in (_NEEDED if scenario is None else _SCENARIO) if find_spec(name) is None]:
        raise Refused(f"The demo needs {', '.join(missing)}; install with: "
                      "pip install 'kvobs[torch,lab,otel,prometheus]'.")
    if scenario is not None:
        if device == "cpu":
            raise Refused("--scenario plays on virtual GPUs of its own, so --device cpu is not allowed beside it.")
        from kvobs.lab import scenarios

        return scenarios.run(scenario, as_json=as_json, hold_s=hold)
    from kvobs.lab.demo import run, run_vllm

    if engine is not None:
        return run_vllm(directory=engine_env, yes=yes, as_json=as_json)
    return run(turns=turns, as_json=as_json, deep=deep, device=device)
