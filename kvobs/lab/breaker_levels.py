"""Chat under rising load on the virtual GPU, with and without the breaker: ``python -m kvobs.lab.breaker_levels``.

Sessions come and talk as in a serving trace; transformers' own caches grow on a virtual GPU with the L40S profile,
with and without expandable segments. The breaker, its gate and its actions are those of any process; the clock is
modelled, so that a run takes seconds and is the same each time but for how long the host's own work took.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import msgspec

from kvobs import virtual
from kvobs.breaker.simulator._trace import TraceError, read_trace
from kvobs.lab.breaker._engine import BYTES_PER_TOKEN, STEP
from kvobs.lab.breaker._load import CALM, LOADS, RISING
from kvobs.lab.breaker._outcome import Outcome
from kvobs.lab.breaker._results import Results, Settings
from kvobs.lab.breaker._setting import ARMS, DEVICE_BYTES, PROFILE, WEIGHT_BYTES
from kvobs.lab.breaker._table import table

TRACE = Path("../shared/data/serving/AzureLLMInferenceTrace_conv.csv")
FIRST_SEED = 200  # the thresholds of the policy were chosen on seeds below 120
QUICK_ARMS, QUICK_SEEDS, QUICK_S = ("baseline", "observe", "act"), 1, 60
JOB_S = 3_600.0


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 where a run failed, 2 after a refusal (one sentence on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m kvobs.lab.breaker_levels", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each arm, load and allocator setting (20)")
    parser.add_argument("--quick", action="store_true", help="one short run of three arms under rising load")
    parser.add_argument("--trace", type=Path, default=TRACE, help=f"Azure's CSV or Mooncake's JSONL ({TRACE})")
    parser.add_argument("--out", type=Path, help="write the results there as JSON")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table of results that were written before")
    given = parser.parse_args(arguments)
    if given.runs < 1:
        parser.error("--runs takes a number of at least 1.")
    try:
        if given.show is not None:
            results = msgspec.json.decode(given.show.read_bytes(), type=Results)
        else:
            read_trace(given.trace)
            if why := virtual.why_not():
                raise virtual.Unavailable(why)
            results = measure(given.trace.absolute(), given.runs, quick=given.quick, out=given.out)
    except (TraceError, virtual.Unavailable) as error:
        print(f"kvobs: {error}", file=sys.stderr)
        return 2
    except (OSError, msgspec.MsgspecError, subprocess.SubprocessError) as error:
        print(f"kvobs: The experiment ended early: {error}.", file=sys.stderr)
        return 1
    print(table(results))
    return 0


def measure(trace: Path, runs: int, *, quick: bool = False, out: Path | None = None) -> Results:
    """All runs; what there is so far is written to ``out`` after each job."""
    seeds = list(range(FIRST_SEED, FIRST_SEED + (QUICK_SEEDS if quick else runs)))
    results = Results(_settings(trace, seeds), [])
    for job in jobs(trace, seeds, quick=quick):
        results.runs.extend(_done(job))
        if out is not None:
            out.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    return results


def jobs(trace: Path, seeds: list[int], *, quick: bool = False) -> Iterator[dict[str, object]]:
    """Each is done by a process of its own; the quick form is one."""
    rest: dict[str, object] = {"seeds": seeds, "trace": str(trace), "seconds": QUICK_S if quick else None}
    if quick:
        yield {"expandable": False, "plays": [{"arm": arm, "load": RISING.name} for arm in QUICK_ARMS], **rest}
        return
    for load in (RISING, CALM):
        for expandable in (False, True):
            for arm in ARMS:
                yield {"expandable": expandable, "plays": [{"arm": arm, "load": load.name}], **rest}


def _done(job: dict[str, object]) -> list[Outcome]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("KVOBS_", "OTEL_"))}
    done = subprocess.run([sys.executable, "-m", "kvobs.lab.breaker._job"], input=json.dumps(job), text=True,
                          capture_output=True, timeout=JOB_S, check=False, env={**environment, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise subprocess.SubprocessError(f"a process of the experiment failed: {done.stderr.strip()[-600:]}")
    return [msgspec.json.decode(line, type=Outcome) for line in done.stdout.splitlines()]


def _settings(trace: Path, seeds: list[int]) -> Settings:
    return Settings(
        trace=trace.name, latency=PROFILE, device_bytes=DEVICE_BYTES, weight_bytes=WEIGHT_BYTES,
        bytes_per_token=BYTES_PER_TOKEN, tokens_per_step=STEP,
        loads={load.name: (load.seconds, load.first, load.last) for load in LOADS.values()}, arms=ARMS, seeds=seeds,
        versions={name: version(name) for name in ("kvobs", "torch", "transformers")} | {
            "python": platform.python_version()},
        machine=platform.machine(), processors=os.cpu_count() or 0, load_before=os.getloadavg()[0])


if __name__ == "__main__":
    sys.exit(main())
