"""``python -m kvobs.lab.breaker_vllm``: measure, print the table, and write the results."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec

from kvobs.breaker import PRESETS, PolicyError
from kvobs.breaker.simulator._trace import TraceError
from kvobs.lab.breaker_vllm._run import LOOK_AHEAD, SESSIONS, Results, measure, table
from kvobs.lab.demo._cache import prepared
from kvobs.lab.demo._errors import DemoError
from kvobs.lab.demo._vllm_env import environment, look

ARMS = ("off", "observe", "act")


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 where vLLM failed, 2 after a refusal (one sentence on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m kvobs.lab.breaker_vllm", description=__doc__)
    parser.add_argument("--python", type=Path, help="of an environment with vLLM; that of kvobs demo without it")
    parser.add_argument("--runs", type=int, default=5, help="pairs of runs (5)")
    parser.add_argument("--sessions", type=int, default=SESSIONS, help=f"chat sessions of a run ({SESSIONS})")
    parser.add_argument("--arms", default="off,act", help="modes of the breaker; the first is compared with (off,act)")
    parser.add_argument("--trace", type=Path, help="lengths from a serving trace (Azure's CSV, Mooncake's JSONL)")
    parser.add_argument("--policy", default="default", help="default, article, look-ahead or a TOML file (default)")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of results that were written before")
    given = parser.parse_args(arguments)
    arms = tuple(given.arms.split(","))
    if given.runs < 1 or given.sessions < 1 or len(set(arms)) < 2 or not {*arms} <= {*ARMS} or len(arms) > len(ARMS):
        parser.error(f"It takes runs and sessions of at least 1, and at least two arms of {', '.join(ARMS)}.")
    try:
        if given.show is not None:
            print(table(msgspec.json.decode(given.show.read_bytes(), type=Results)))
            return 0
        if given.python is None:
            place, found = environment(None, consent=lambda _: False)
            python = place / "bin" / "python"
        else:
            python = given.python.absolute()
            found = look(python.parent.parent)
            if not found.ready:
                raise DemoError(f"{given.python} is no Python of an environment with vLLM and kvobs's own needs.")

        def keep(results: Results) -> None:
            if given.out is not None:
                given.out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")

        # The servers are of process groups of their own, which nobody else would end.
        signal.signal(signal.SIGTERM, _leave)
        policy = str(LOOK_AHEAD if given.policy == "look-ahead" else given.policy)
        if policy not in PRESETS:
            policy = str(Path(policy).absolute())  # the servers run elsewhere
        results = measure(python, found.vllm, prepared(), arms=arms, runs=given.runs, sessions=given.sessions,
                          trace=given.trace, policy=policy, keep=keep)
    except (DemoError, TraceError, PolicyError) as error:
        print(f"kvobs: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"kvobs: The experiment ended early: {error}.", file=sys.stderr)
        return 1
    print(table(results))
    return 0


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
