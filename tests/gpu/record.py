"""Record real snapshots of an inference program on a GPU, replay them through the twin, and print the score.

``python tests/gpu/record.py --out DIR [--model DIR]``. Each part runs in processes of its own with a deadline, so that
one part's failure costs no other; all of them take six minutes at most. DIR gets ``figures.json`` and one small
sanitised trace per part. The exit code is 0 where every part ran, whatever the scores; 1 where one did not; 2 where
there is no device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.gpu import _part
from tests.gpu._checks import failed
from tests.gpu._device import KINDS, environment_for
from tests.gpu._part import ABOUT, ABOUT_SECONDS, PARTS, RESULT, SNAPSHOT, Part

TOTAL_SECONDS, LEAST_SECONDS = 350.0, 10.0
COMPILING_SECONDS = 600.0  # a virtual GPU is compiled at its first use
JUDGING = 0.35  # of a part's seconds
FIGURES, MOST_BYTES = "figures.json", 1_000_000
VERDICT, TRACE = "judged.json", "trace.pickle.gz"


def main(arguments: Sequence[str] | None = None) -> int:
    """The script, or (with ``--child``) one of its processes."""
    asked = _parser().parse_args(arguments)
    if asked.child:
        return _child(asked)
    return Script(asked).run()


class Script:
    """One run of all parts."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked, self._began = asked, time.monotonic()
        self._figures: dict[str, Any] = {"kind": asked.kind, "parts": {}}

    def run(self) -> int:
        """Every part, the summary, and the files."""
        out: Path = self._asked.out
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="kvobs-gpu-") as scratch:
            about = self._about(Path(scratch))
            if "skipped" in about:
                self._say(f"Nothing ran: {about['skipped']}")
                return 2
            self._figures["about"] = about
            for part in PARTS:
                if not self._asked.only or part.name in self._asked.only:
                    self._figures["parts"][part.name] = self._part(part, Path(scratch), observed=True)
                    self._write(out)
            again = self._figures["parts"].get("graph-model", {})
            if "failed" in again:  # whose fault was it?
                graph = _part.BY_NAME["graph-model"]
                self._figures["parts"]["graph-model, not observed"] = self._part(graph, Path(scratch), observed=False)
        self._figures["seconds"] = round(time.monotonic() - self._began, 1)
        self._write(out)
        self._summary()
        return 1 if any("failed" in told for told in self._figures["parts"].values()) else 0

    def _about(self, scratch: Path) -> dict[str, Any]:
        work = scratch / ABOUT
        work.mkdir()
        seconds = ABOUT_SECONDS if self._asked.kind == "cuda" else COMPILING_SECONDS
        told = self._process(work, ABOUT, seconds, "", RESULT, observed=True)
        self._say(json.dumps(told, indent=1))
        if self._asked.kind != "cuda":
            self._began = time.monotonic()
        return told

    def _part(self, part: Part, scratch: Path, *, observed: bool) -> dict[str, Any]:
        """Record and judge one part; its figures."""
        patience, began = self._asked.patience, time.monotonic()
        left = TOTAL_SECONDS * patience - (began - self._began)
        seconds = min(part.seconds * patience, left)
        if left < LEAST_SECONDS:
            self._say(f"{part.name}: not begun, for the time is over.")
            return {"failed": "the time was over before it began"}
        work = scratch / f"{part.name}{'' if observed else '-plain'}"
        work.mkdir()
        self._say(f"{part.name}{'' if observed else ' (not observed)'}: begins, {seconds:.0f} s at most.")
        told = self._process(work, part.name, seconds * (1 - JUDGING), part.conf, RESULT, observed=observed)
        if (work / SNAPSHOT).exists():
            (work / RESULT).write_text(json.dumps(told), encoding="utf-8")
            rest = seconds - (time.monotonic() - began)
            told["judged"] = self._process(work, part.name, rest, "", VERDICT, observed=observed, judge=True)
        told["seconds"] = round(time.monotonic() - began, 1)
        if observed and (work / TRACE).exists() and (work / TRACE).stat().st_size:
            target = self._asked.out / f"trace-{part.name}.pickle.gz"
            target.write_bytes((work / TRACE).read_bytes())
        if self._asked.keep and (work / SNAPSHOT).exists():
            (work / SNAPSHOT).rename(self._asked.out / f"raw-{part.name}.pickle")
        for line in lines(part.name, told):
            self._say(line)
        return told

    def _process(self, work: Path, name: str, seconds: float, conf: str, result: str, *, observed: bool,
                 judge: bool = False) -> dict[str, Any]:
        """Run a process of this script to its end or its deadline; what it wrote, or why it wrote nothing."""
        asked = self._asked
        command = [sys.executable, "-m", "tests.gpu.record", "--out", str(work), "--kind", asked.kind, "--child", name,
                   "--seconds", f"{seconds:.1f}", *(["--judge"] if judge else []), *(["--tiny"] if asked.tiny else []),
                   *([] if observed else ["--unobserved"]),
                   *(["--model", str(asked.model.resolve())] if asked.model else [])]
        child = subprocess.Popen(command, cwd=ROOT, env=environment_for(conf, os.environ), stdin=subprocess.DEVNULL,
                                 start_new_session=True)
        try:
            code: int | None = child.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)  # a session of its own: also what it started
                child.wait()
        try:
            told: dict[str, Any] = json.loads((work / result).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            told = {}
        if code is None:
            told |= {"failed": f"it did not end within {seconds:.0f} s"}
        elif not told:
            told = {"failed": f"it ended with status {code} and wrote nothing"}
        return told

    def _write(self, out: Path) -> None:
        text = json.dumps(self._figures, indent=1)
        if len(text) > MOST_BYTES:
            text = json.dumps({"failed": f"The figures have {len(text)} bytes.", "about": self._figures.get("about")})
        (out / FIGURES).write_text(text + "\n", encoding="utf-8")

    def _summary(self) -> None:
        self._say("Summary")
        for name, told in self._figures["parts"].items():
            for line in lines(name, told):
                self._say(line)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def lines(name: str, told: Mapping[str, Any]) -> list[str]:
    """A part's figures in words."""
    found = []
    if "skipped" in told or "failed" in told:
        found.append(f"{name}: {'skipped' if 'skipped' in told else 'FAILED'}: "
                     f"{told.get('skipped') or told.get('failed')}")
    judged = told.get("judged") or {}
    if "failed" in judged:
        found.append(f"{name}: judging FAILED: {judged['failed']}")
    for engine, scores in (judged.get("scores") or {}).items():
        for one in scores:
            found.append(f"{name}, {engine}: " + ", ".join(
                f"{fact.replace('_', ' ')} {one[fact][0]:,}/{one[fact][1]:,}"
                for fact in ("addresses", "device_allocs", "device_frees"))
                + f" of {one['events']:,} events" + (f" ({one['reason']})" if one["reason"] else ""))
    for oom in judged.get("ooms") or []:
        found.append(f"{name}, {oom['label']}: {oom['verdict']} (by bytes: {oom['truth'] or 'at the margin'}). "
                     f"{oom['sentence']}")
    checks = every_check(told)
    if checks:
        wrong = failed(checks)
        found.append(f"{name}: {len(checks) - len(wrong)} of {len(checks)} checks hold"
                     + (f"; not: {'; '.join(wrong)}" if wrong else ""))
    if "pools" in judged:
        pools = judged["pools"]
        found.append(f"{name}: of {pools['events']:,} events, those that name a pool: "
                     f"{pools['events_naming_a_pool'] or 'none'}; segments by pool: {pools['pools_of_segments']}")
    return found


def every_check(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All comparisons of a part."""
    judged, later = told.get("judged") or {}, told.get("without_history") or {}
    return [*told.get("checks", ()), *told.get("metrics", ()), *later.get("checks", ()), *judged.get("checks", ())]


def _child(asked: argparse.Namespace) -> int:
    work: Path = asked.out
    if asked.child == ABOUT:
        return _part.about(asked.kind, work)
    if asked.judge:
        return _judge(work)
    return _part.run(_part.Asked(_part.BY_NAME[asked.child], asked.kind, work,
                                 time.monotonic() + asked.seconds * 0.6, asked.model, asked.tiny, not asked.unobserved))


def _judge(work: Path) -> int:
    from tests.gpu._judge import judged, rescored

    result = json.loads((work / RESULT).read_text(encoding="utf-8"))
    told, trace = judged(work / SNAPSHOT, result)
    if trace:
        (work / TRACE).write_bytes(trace)
        told["published"] |= rescored(work / TRACE)
    (work / VERDICT).write_text(json.dumps(told), encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the figures and the small traces go")
    parser.add_argument("--model", type=Path, help="a checkpoint with a chat template; default: random weights")
    parser.add_argument("--kind", choices=KINDS, default="cuda", help="vgpu rehearses on kvobs's virtual GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a rehearsal")
    parser.add_argument("--only", action="append", choices=sorted(_part.BY_NAME), help="this part (repeatable)")
    parser.add_argument("--keep", action="store_true", help="keep the snapshots themselves too: large, with paths")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on all seconds, for a slow machine")
    for hidden in ("--child", "--seconds"):
        parser.add_argument(hidden, type=str if hidden == "--child" else float, help=argparse.SUPPRESS)
    for hidden in ("--judge", "--unobserved"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
