"""``kvobs k8s-events``: what happened to a pod's engine as events on the pod."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvobs import config
from kvobs.cli._errors import Refused
from kvobs.cli._output import plain, say

if TYPE_CHECKING:
    from kvobs.cli import k8s

SECOND_NS = 1_000_000_000
LAST_S = 5.0  # for the last look and its writes; a pod is killed after 30 s


def k8s_events(pod: Annotated[str, typer.Option(envvar="POD_NAME", help="The pod that events are about.")],
               namespace: Annotated[str, typer.Option(envvar="POD_NAMESPACE", help="Its namespace.")],
               store: Annotated[Path | None, typer.Option(help="A store or a directory of stores.",
                                                          show_default="the configured one")] = None,
               every: Annotated[float, typer.Option(help="Seconds from one look to the next.", min=1, max=3600)] = 5.0,
               kubeconfig: Annotated[Path | None, typer.Option(help="A kubeconfig; without one the pod's own service "
                                                               "account.", show_default=False)] = None,
               server: Annotated[str, typer.Option(metavar="URL", help="An API server that asks for no credentials, "
                                                   "such as kubectl proxy.", show_default=False)] = "",
               once: Annotated[float, typer.Option(metavar="SECONDS", help="Write what happened in the last SECONDS, "
                                                   "and end.", min=0, show_default=False)] = 0) -> None:
    """Write breaker transitions, out-of-memory errors and burning budgets as Kubernetes events on the pod."""
    loaded = config.load()
    place = store if store is not None else loaded.store
    if place is None:
        raise Refused("The store is off in this configuration; name one with --store.")
    from kvobs.cli import k8s
    from kvobs.store import StoreError, StoreReader

    try:
        api, target = k8s.connect(namespace, pod, kubeconfig, server)
        recorder = k8s.Recorder(api, target, loaded.jaeger_url)
        if once:
            now = time.time_ns()
            recorder.add(k8s.Watch(StoreReader(place)).facts(now - int(once * SECOND_NS), now))
            written = recorder.write(now)
            if recorder.problem:
                raise Refused(recorder.problem)
            say(f"{written} events were written." if written != 1 else "1 event was written.")
            return
        _follow(place, recorder, every, f"Events of {place} go to the pod {namespace}/{pod}.")
    except (k8s.ApiError, StoreError) as error:
        raise Refused(str(error)) from None


class _Following:
    """A store that is not there yet, or not readable now, is looked for again; what is wrong is said once."""

    def __init__(self, place: Path, recorder: k8s.Recorder) -> None:
        from kvobs.cli.k8s import ALERT
        from kvobs.store import Tail

        self._place, self._recorder = place, recorder
        self._tail = Tail(place, ALERT)
        self._watch: k8s.Watch | None = None
        self._told = ""

    def look(self, *, last: bool = False) -> None:
        """Write what came and is due; with ``last`` also what waits for its time."""
        from kvobs.cli.k8s import Watch
        from kvobs.store import StoreError, StoreReader

        problem = ""
        try:
            self._watch = self._watch or Watch(StoreReader(self._place))
            self._recorder.add(self._watch.told(self._tail.look()))
        except StoreError as error:
            problem = str(error)
        write = self._recorder.flush if last else self._recorder.write
        write(time.monotonic_ns())
        problem = problem or self._recorder.problem
        if problem and problem != self._told:
            said = "were not written" if last else "wait"
            print(f"kvobs: {plain(problem)} {self._recorder.pending} events {said}.", file=sys.stderr, flush=True)
        self._told = problem


def _follow(place: Path, recorder: k8s.Recorder, every: float, begun: str) -> None:
    """Until a signal, and then once more: a pod that ends is when its last seconds matter."""
    with _ended() as ended:
        following = _Following(place, recorder)
        say(begun)
        while not ended.wait(every):
            following.look()
        last = threading.Thread(target=following.look, kwargs={"last": True}, daemon=True)
        last.start()
        last.join(LAST_S)
        if last.is_alive():
            print(f"kvobs: The last look took more than {LAST_S:g} s; {recorder.pending} events were not written.",
                  file=sys.stderr, flush=True)


@contextmanager
def _ended() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM."""
    ended = threading.Event()
    before = [(number, signal.signal(number, lambda *_: ended.set())) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield ended
    finally:
        for number, handler in before:
            signal.signal(number, handler)
