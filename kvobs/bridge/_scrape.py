"""One target, scraped again and again on a thread of its own; the latest outcome, for whoever asks."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from kvobs.bridge._exposition import NOT_FINITE, parse
from kvobs.bridge._fetch import Fetcher, FetchError, Target
from kvobs.bridge._mapping import Mapped, Translator

SECOND = 1_000_000_000
HANGING_NS = 2 * SECOND  # after its timeout: a fetch that still runs then is taken for failed


class Outcome(msgspec.Struct, frozen=True):
    """What is known of a target at one moment; ``mapped`` is absent unless the last scrape was good."""

    target: str
    mapped: Mapped | None
    reason: str
    age_ns: int
    duration_ns: int | None
    good: int
    failed: int
    dropped: dict[str, int]

    @property
    def up(self) -> bool:
        """Whether the last scrape was good."""
        return self.mapped is not None


def scrape(fetcher: Fetcher, translator: Translator) -> Mapped:
    """Fetch and read one page.

    Raises:
        FetchError: it cannot be had, is no whole metrics page, or holds nothing that the table knows.
    """
    name = fetcher.target.name
    page = parse(fetcher.fetch(), translator.knows)
    if not page.samples and not page.ignored and page.dropped:
        raise FetchError(f"The answer of {name} is not Prometheus or OpenMetrics text.")
    if not (page.eof if fetcher.openmetrics else page.whole):
        raise FetchError(f"The answer of {name} ended early.")
    found = translator.translate(page.samples, name)
    ignored = found.ignored + page.ignored
    if not found.samples and NOT_FINITE not in page.dropped:  # what is known and NaN is known
        samples = ignored + sum(page.dropped.values())
        raise FetchError(f"{name} answers, but none of its {samples} samples is known." if samples else
                         f"{name} answers, but with no sample at all.")
    return Mapped(found.readings, found.samples, ignored,
                  dict(Counter(page.dropped) + Counter(found.dropped)))


class Scraper:
    """Scrapes one target every so often once started."""

    def __init__(self, target: Target, translator: Translator, every_s: float, timeout_s: float,
                 clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.target = target
        self._translator, self._every_s, self._clock = translator, every_s, clock
        self._fetcher = Fetcher(target, timeout_s)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._good_ns = clock()
        self._asking_since: int | None = None
        self._mapped: Mapped | None = None
        self._reason = f"{target.name} has not been scraped yet."
        self._duration_ns: int | None = None
        self._scrapes: Counter[bool] = Counter()
        self._dropped: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to scrape."""
        self._thread = threading.Thread(target=self._scrape_forever, name="kvobs-bridge", daemon=True)
        self._thread.start()

    def stop(self, within_s: float) -> None:
        """End the scrape that is under way, and all others."""
        self._stopping.set()
        self._fetcher.abort()
        if self._thread is not None:
            self._thread.join(within_s)

    def outcome(self, now_ns: int) -> Outcome:
        """What is known now."""
        with self._lock:
            mapped, reason = self._mapped, self._reason
            limit_ns = round(self._fetcher.timeout_s * SECOND) + HANGING_NS
            if self._asking_since is not None and now_ns - self._asking_since > limit_ns:
                mapped, reason = None, f"{self.target.name} keeps the connection open and does not answer."
            return Outcome(self.target.name, mapped, reason, max(0, now_ns - self._good_ns), self._duration_ns,
                           self._scrapes[True], self._scrapes[False], dict(self._dropped))

    def once(self) -> None:
        """Scrape now."""
        began = self._clock()
        with self._lock:
            self._asking_since = began
        mapped, reason = None, ""
        try:
            mapped = scrape(self._fetcher, self._translator)
        except FetchError as error:
            reason = str(error)
        except Exception as error:  # a page that nobody thought of must not end the bridge
            reason = f"The answer of {self.target.name} could not be read ({type(error).__name__})."
        now = self._clock()
        with self._lock:
            self._asking_since, self._mapped, self._reason, self._duration_ns = None, mapped, reason, now - began
            self._scrapes[mapped is not None] += 1
            if mapped is not None:
                self._good_ns = now
                self._dropped += Counter(mapped.dropped)

    def _scrape_forever(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self.once()
            self._stopping.wait(max(0.0, self._every_s - (time.monotonic() - began)))
