"""``kvobs bridge``: metrics of engines that cannot be hooked, scraped and served as kvobs metrics."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from kvobs import config
from kvobs.cli._errors import Refused
from kvobs.cli._output import plain, print_table, say

if TYPE_CHECKING:
    from kvobs.bridge import BridgeSource, Mapped, Outcome, Target, Translator
    from kvobs.runtime import Runtime

MOST_TARGETS = 64
SERIES = 4096  # per metric: 64 engines of a few models, ranks and states each
LOOK_S = 0.5
_NO_ENDPOINT = 'The Prometheus endpoint needs prometheus-client; install with: pip install "kvobs[prometheus]".'


def bridge(scrape: Annotated[list[str], typer.Option("--scrape", metavar="URL", help="A metrics page; may be given "
                                                     "several times. /metrics is its path if it has none.")],
           every: Annotated[float, typer.Option(help="Seconds from one scrape to the next.", min=0.2, max=3600)] = 5.0,
           store: Annotated[str | None, typer.Option(help="A directory for the store, auto or off.",
                                                     show_default="the configured one")] = None,
           prometheus: Annotated[str | None, typer.Option(help="HOST:PORT where /metrics is served, or off.",
                                                          show_default="the configured one")] = None,
           table: Annotated[Path | None, typer.Option("--map", metavar="FILE", help="A TOML table of further metrics; "
                                                      "it goes before the built-in one.", show_default=False)] = None,
           once: Annotated[bool, typer.Option("--once", help="Scrape once and show what it means.")] = False,
           as_json: Annotated[bool, typer.Option("--json", help="With --once: as one JSON array.")] = False) -> None:
    """Turn the metrics of vLLM, SGLang, LMCache, TGI and llama.cpp into kvobs metrics: kvobs bridge --scrape URL."""
    from kvobs.bridge import TableError, Translator, with_file

    if as_json and not once:
        raise Refused("The option --json belongs to --once.")
    targets = _targets(scrape)
    try:
        translator = Translator(with_file(table))
    except TableError as error:
        raise Refused(str(error)) from None
    given = {name: text for name, text in (("store", store), ("prometheus", prometheus)) if text is not None}
    loaded = config.load(None, **given)
    if once:
        _show_once(targets, translator, as_json)
        return
    if prometheus is not None and loaded.prometheus is not None and find_spec("prometheus_client") is None:
        raise Refused(_NO_ENDPOINT)
    loaded = msgspec.structs.replace(loaded, enabled=True, max_series=max(loaded.max_series, SERIES))
    _serve(targets, translator, every, loaded, own_port=prometheus is not None)


def _targets(urls: Sequence[str]) -> list[Target]:
    from kvobs.bridge import target_of

    try:
        targets = [target_of(url) for url in urls]
    except ValueError as error:
        raise Refused(str(error)) from None
    if len({target.name for target in targets}) < len(targets):
        raise Refused("The option --scrape names an address twice.")
    if len(targets) > MOST_TARGETS:
        raise Refused(f"The option --scrape names {len(targets)} addresses; one bridge takes {MOST_TARGETS}.")
    return targets


def _show_once(targets: Sequence[Target], translator: Translator, as_json: bool) -> None:
    """Raises Refused after what could be had was shown, if something could not."""
    from kvobs.bridge import Fetcher, FetchError, scrape

    found: list[tuple[Target, Mapped | None, str]] = []
    for target in targets:
        try:
            found.append((target, scrape(Fetcher(target), translator), ""))
        except FetchError as error:
            found.append((target, None, str(error)))
    if as_json:
        print(json.dumps([_told(*one) for one in found], indent=2))
    else:
        for target, mapped, _ in found:
            if mapped is not None:
                _print_mapped(target, mapped)
    if reasons := [reason for _, _, reason in found if reason]:
        raise Refused(" ".join(reasons))


def _told(target: Target, mapped: Mapped | None, reason: str) -> dict[str, Any]:
    if mapped is None:
        return {"target": target.name, "up": False, "reason": reason}
    return {"target": target.name, "up": True, "mapped": mapped.samples, "ignored": mapped.ignored,
            "dropped": mapped.dropped, "readings": [
                {"metric": name, "attributes": dict(zip(_attributes(name), values, strict=True)), "value": value}
                for name, values, value in mapped.readings]}


def _attributes(name: str) -> tuple[str, ...]:
    from kvobs.catalog import BY_NAME

    return BY_NAME[name].attributes


def _print_mapped(target: Target, mapped: Mapped) -> None:
    from kvobs.catalog import BY_NAME

    rows = []
    for name, values, value in sorted(mapped.readings):
        known = dict(zip(_attributes(name), values, strict=True))
        known.pop("target")
        rows.append((name, " ".join(f"{key}={text}" for key, text in known.items() if text),
                     f"{value:.10g}", BY_NAME[name].unit))
    print_table(("metric (scraped)", "of", "value", "unit"), rows)
    say(f"{target.name}: {_counted(mapped)}.")


def _counted(mapped: Mapped) -> str:
    dropped = sum(mapped.dropped.values())
    return f"{mapped.samples} samples mapped, {mapped.ignored} ignored" + (f", {dropped} dropped" if dropped else "")


def _serve(targets: Sequence[Target], translator: Translator, every_s: float, loaded: config.Config, *,
           own_port: bool) -> None:
    from kvobs.bridge import TIMEOUT_S, BridgeSource, Scraper
    from kvobs.runtime import Runtime

    source = BridgeSource([Scraper(target, translator, every_s, TIMEOUT_S) for target in targets])
    runtime = Runtime(loaded, [source])
    with _ended_by_signals() as ending:
        runtime.start()
        try:
            _check_port(runtime, own_port)
            _say_where(runtime, len(targets), every_s)
            _watch(source, ending)
        finally:
            runtime.stop()


def _check_port(runtime: Runtime, own_port: bool) -> None:
    wanted = runtime.config.prometheus
    if own_port and wanted is not None and wanted[1] and (
            runtime.endpoint is None or not runtime.endpoint.endswith(f":{wanted[1]}/metrics")):
        raise Refused(f"The address {wanted[0]}:{wanted[1]} cannot be bound; name another, or port 0 for a free one.")


def _say_where(runtime: Runtime, targets: int, every_s: float) -> None:
    places = [f"metrics at {runtime.endpoint}"] if runtime.endpoint else []
    if runtime.config.store is not None:
        places.append(f"store in {runtime.config.store}")
    say(f"Scraping {targets} address{'es' if targets > 1 else ''} every {every_s:g} s"
        + (": " + ", ".join(places) if places else "") + ".")
    if runtime.config.prometheus is not None and runtime.endpoint is None and find_spec("prometheus_client") is None:
        say(_NO_ENDPOINT)
    sys.stdout.flush()


@contextmanager
def _ended_by_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set; both do what they did before afterwards."""
    ending = threading.Event()
    before = {number: signal.signal(number, lambda *_: ending.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(source: BridgeSource, ending: threading.Event) -> None:
    """Say how the scrapes go until the end: a line per target on a terminal, else one per change, on stderr."""
    def look() -> list[Outcome]:
        now = time.monotonic_ns()
        return [scraper.outcome(now) for scraper in source.scrapers]

    if sys.stderr.isatty():
        _watch_live(look, ending)
        return
    told: dict[str, tuple[bool, str]] = {}
    while not ending.wait(LOOK_S):
        for outcome in look():
            if outcome.good + outcome.failed and told.get(outcome.target) != (outcome.up, outcome.reason):
                told[outcome.target] = (outcome.up, outcome.reason)
                print(f"kvobs: {plain(_status(outcome))}", file=sys.stderr, flush=True)


def _watch_live(look: Callable[[], list[Outcome]], ending: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while not ending.wait(LOOK_S):
            live.update(Text("\n".join(plain(_status(outcome)) for outcome in look())), refresh=True)


def _status(outcome: Outcome) -> str:
    if outcome.mapped is None:
        return f"{outcome.reason} Last good scrape: " + (
            f"{outcome.age_ns / 1e9:.0f} s ago." if outcome.good else "none yet.")
    return f"{outcome.target} answers: {_counted(outcome.mapped)}, {outcome.age_ns / 1e9:.1f} s old."
