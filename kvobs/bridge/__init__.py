"""The bridge: metrics of engines that cannot be hooked, as kvobs metrics that are marked scraped."""

from kvobs.bridge._fetch import TIMEOUT_S, Fetcher, FetchError, Target, target_of
from kvobs.bridge._mapping import Mapped, Translator
from kvobs.bridge._scrape import Outcome, Scraper, scrape
from kvobs.bridge._source import BridgeSource
from kvobs.bridge._table import TableError, built_in, with_file

__all__ = [
    "TIMEOUT_S",
    "BridgeSource",
    "FetchError",
    "Fetcher",
    "Mapped",
    "Outcome",
    "Scraper",
    "TableError",
    "Target",
    "Translator",
    "built_in",
    "scrape",
    "target_of",
    "with_file",
]
