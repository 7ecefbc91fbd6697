"""Source: what engines elsewhere say of themselves. Threads of its own scrape; a sample only reads outcomes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kvobs.bridge._mapping import Reading
from kvobs.bridge._scrape import SECOND, Outcome, Scraper
from kvobs.model import Availability, Emit, Event, Poll, ProcessRole

SOURCE = ROLE = "bridge"
ENGINE = "kvobs"  # the process is none of the engines that it scrapes
STOP_S = 3.0


class BridgeSource:
    """Scrapes while it is installed; a sample tells what every target said last, and nothing of those that failed."""

    name = SOURCE

    def __init__(self, scrapers: Sequence[Scraper]) -> None:
        self.scrapers = tuple(scrapers)

    def install(self, emit: Emit) -> None:
        """Begin to scrape."""
        for scraper in self.scrapers:
            scraper.start()

    def uninstall(self) -> None:
        """End all scrapes; the last sample was before."""
        deadline = time.monotonic() + STOP_S
        for scraper in self.scrapers:
            scraper.stop(max(0.0, deadline - time.monotonic()))

    def sample(self, now_ns: int) -> Iterable[Event]:
        """One poll of all targets, and what this process is."""
        began = time.perf_counter_ns()
        outcomes = [scraper.outcome(now_ns) for scraper in self.scrapers]
        found = tuple(reading for outcome in outcomes for reading in readings(outcome))
        yield Poll(now_ns, SOURCE, time.perf_counter_ns() - began, found)
        yield ProcessRole(now_ns, ENGINE, ROLE, ())

    def availability(self) -> Iterable[Availability]:
        """Which targets answer, and why others do not."""
        now = time.monotonic_ns()
        for outcome in (scraper.outcome(now) for scraper in self.scrapers):
            yield Availability(f"scrape {outcome.target}", outcome.up, outcome.reason)


def readings(outcome: Outcome) -> Iterable[Reading]:
    """The points of one target: how scraping it goes always, what it says of itself only while it says it."""
    target = (outcome.target,)
    yield "kvobs.engine.up", target, float(outcome.up)
    yield "kvobs.engine.age", target, outcome.age_ns / SECOND
    if outcome.duration_ns is not None:
        yield "kvobs.engine.scrape.duration", target, outcome.duration_ns / SECOND
    yield "kvobs.engine.scrapes", (*target, "good"), float(outcome.good)
    yield "kvobs.engine.scrapes", (*target, "failed"), float(outcome.failed)
    for reason, count in outcome.dropped.items():
        yield "kvobs.engine.scrape.dropped", (*target, reason), float(count)
    if outcome.mapped is not None:
        for word, samples in (("mapped", outcome.mapped.samples), ("ignored", outcome.mapped.ignored),
                              ("dropped", sum(outcome.mapped.dropped.values()))):
            yield "kvobs.engine.scrape.series", (*target, word), float(samples)
        yield from outcome.mapped.readings
