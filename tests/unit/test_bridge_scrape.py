"""Fetching and scraping a page: addresses, limits, refusals, and what the source tells of a target that fails."""

from __future__ import annotations

import gzip
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from kvobs.bridge import BridgeSource, Fetcher, FetchError, Scraper, Translator, built_in, scrape, target_of
from kvobs.bridge import _fetch as fetching
from kvobs.catalog import BY_NAME
from kvobs.metrics import Metrics
from kvobs.model import Poll
from tests.served_page import Page, served, text
from tests.support import free_port, wait_until

PAGE = 'vllm:num_preemptions_total{engine="0",model_name="m"} 6\nvllm:kv_cache_usage_perc{engine="0"} 0.5\nother 1\n'
TRANSLATOR = Translator(built_in())


@pytest.fixture
def page() -> Iterator[Page]:
    with served(text(PAGE)) as found:
        yield found


def refusal(url: str, timeout_s: float = 5.0) -> str:
    with pytest.raises(FetchError) as caught:
        scrape(Fetcher(target_of(url), timeout_s), TRANSLATOR)
    assert str(caught.value).endswith(".")
    return str(caught.value)


@pytest.mark.parametrize(("url", "host", "port", "path", "name"), [
    ("http://h:8000", "h", 8000, "/metrics", "h:8000"),
    ("https://h/", "h", 443, "/metrics", "h:443"),
    ("http://h/inner/metrics?x=1", "h", 80, "/inner/metrics?x=1", "h:80/inner/metrics"),
    ("http://[::1]:8000", "::1", 8000, "/metrics", "[::1]:8000"),
])
def test_an_address_is_a_page_and_a_name(url: str, host: str, port: int, path: str, name: str) -> None:
    """The path is /metrics where none is given; the name that metrics show has no query, which may hold a secret."""
    target = target_of(url)
    assert (target.host, target.port, target.path, target.name) == (host, port, path, name)


@pytest.mark.parametrize("url", ["", "h:8000", "ftp://h/", "http://", "http:///metrics", "http://h:99999", "http://h:0",
                                 "http://h/a b", "http://h/#x", "http://[::1", "http://a..b/", "http://h/\n",
                                 "file:///etc/passwd", "http://u:secret@h/", "http://h\u00e9/"])
def test_a_bad_address_is_refused_in_one_sentence(url: str) -> None:
    """The sentence says what is allowed, and never repeats a password."""
    with pytest.raises(ValueError, match=r"^The address .*allowed is http://HOST.*\.$") as caught:
        target_of(url)
    assert "secret" not in str(caught.value)


def test_a_page_is_scraped(page: Page) -> None:
    """A plain page gives its readings and counts; the request asks for text and offers gzip."""
    found = scrape(Fetcher(target_of(page.url)), TRANSLATOR)
    assert {(name, value) for name, _, value in found.readings} == {("kvobs.engine.preemptions", 6.0),
                                                                    ("kvobs.engine.kv.utilization", 0.5)}
    assert (found.samples, found.ignored, found.dropped) == (2, 1, {})
    path, headers = page.asked[0]
    assert (path, headers["accept-encoding"]) == ("/metrics", "gzip")
    assert "text/plain" in headers["accept"]


def test_a_gzipped_page_is_the_same(page: Page) -> None:
    """A compressed page gives the readings of the plain one."""
    plain = scrape(Fetcher(target_of(page.url)), TRANSLATOR)
    page.answer = text(gzip.compress(PAGE.encode()), Content_Encoding="gzip")
    assert scrape(Fetcher(target_of(page.url)), TRANSLATOR) == plain


@pytest.mark.parametrize(("answer", "sentence"), [
    (text("gone", status=404), "answered 404, not 200"),
    (text("<html>\n<body>hello</body>\n"), "is not Prometheus or OpenMetrics text"),
    (text(bytes(range(128, 256)) * 9), "is not Prometheus or OpenMetrics text"),
    (text(PAGE, Content_Length="4000"), "ended early"),
    (text(PAGE + "vllm:num_preemptions_total 12"), "ended early"),
    (text(PAGE, Content_Type="application/openmetrics-text; version=1.0.0"), "ended early"),
    (text(gzip.compress(PAGE.encode())[:-9], Content_Encoding="gzip"), "ended early"),
    (text(PAGE, Content_Encoding="gzip"), "is not what its gzip header says"),
    (text(PAGE, Content_Encoding="br"), "has the encoding 'br'"),
    (text("", status=302, Location="http://127.0.0.2:1/metrics"), "redirects to another host (127.0.0.2:1)"),
    (text("", status=302, Location="file:///etc/passwd"), "redirects to an address that cannot be scraped"),
    (text("", status=302, Location="/metrics"), "redirects more than 3 times"),
])
def test_what_is_no_whole_page_is_refused_in_one_sentence(page: Page, answer: object, sentence: str) -> None:
    """Nothing is read from a page that is cut off, disguised, elsewhere, or no metrics page."""
    page.answer = answer  # type: ignore[assignment]
    assert sentence in refusal(page.url)


@pytest.mark.parametrize(("body", "sentence"), [
    ("up 1\nfoo_total 3\n", "answers, but none of its 2 samples is known."),
    ("", "answers, but with no sample at all."), ("# HELP up Up.\n", "answers, but with no sample at all."),
    ("up 1\nfoo_total{ 3\n\xa7 2\n", "answers, but none of its 3 samples is known.")])
def test_a_page_of_something_else_is_no_engine(page: Page, body: str, sentence: str) -> None:
    """Metrics that the table does not know make no target that is up, and the reason says how many there are."""
    page.answer = text(body)
    metrics, scraper = Metrics(), Scraper(target_of(page.url), TRANSLATOR, 5.0, 5.0)
    scraper.once()
    told(BridgeSource([scraper]), metrics, 1)
    assert points(metrics, "kvobs.engine.up") == {(page.name,): 0.0}
    assert points(metrics, "kvobs.availability") == {(f"scrape {page.name}", f"{page.name} {sentence}"): 0}


def test_an_engine_that_says_only_what_is_not_finite_is_up(page: Page) -> None:
    """A known sample is known with NaN for its value too, so the target is an engine; the value is absent."""
    page.answer = text("vllm:kv_cache_usage_perc NaN\nother 1\n")
    found = scrape(Fetcher(target_of(page.url)), TRANSLATOR)
    assert (found.readings, found.ignored, found.dropped) == ((), 1, {"not_finite": 1})


def test_redirects_on_the_same_host_are_followed(page: Page) -> None:
    """A page that moved on its own host is scraped where it is."""
    def answer(request: BaseHTTPRequestHandler) -> None:
        (text(PAGE) if request.path == "/new" else text("", status=308, Location="/new"))(request)

    page.answer = answer
    assert scrape(Fetcher(target_of(page.url)), TRANSLATOR).samples == 2
    assert [path for path, _ in page.asked] == ["/metrics", "/new"]


def test_an_answer_that_is_too_large_is_refused(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for what was unpacked: a small archive of a huge page is refused."""
    monkeypatch.setattr(fetching, "MAX_BYTES", 1024**2)
    page.answer = text(gzip.compress(b"# " + b"x" * 2 * 1024**2 + b"\n"), Content_Encoding="gzip")
    assert "is larger than 1 MiB" in refusal(page.url)


def test_nobody_there_is_one_sentence() -> None:
    """A refused connection is said with its reason."""
    assert "cannot be reached (connection refused)" in refusal(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(("head", "piece"), [
    (b"HTTP/1.1 200 OK\r\n\r\n", b"# x\n"), (b"HTTP/1.1 200 OK\r\n", b"X"),
    (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x")])
def test_an_answer_that_takes_too_long_is_refused(page: Page, head: bytes, piece: bytes) -> None:
    """A server that sends a little again and again is given up at the deadline, wherever in its answer it is."""
    stop = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(head)
        while not stop.wait(0.01):
            try:
                request.wfile.write(piece)
            except OSError:
                return

    page.answer = drip
    try:
        assert "did not answer in full within 0.2 s" in refusal(page.url, timeout_s=0.2)
    finally:
        stop.set()


def test_no_http_is_one_sentence() -> None:
    """A port that speaks another protocol is said to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        assert re.search(r"is not HTTP \(BadStatusLine\)\.$", refusal(f"http://127.0.0.1:{server.getsockname()[1]}"))
        thread.join()


class Clock:
    """A clock that the test sets, in ns."""

    def __init__(self) -> None:
        self.now = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now

    def after(self, seconds: float) -> int:
        self.now += round(seconds * 1e9)
        return self.now


def points(metrics: Metrics, name: str) -> dict[tuple[str, ...], object]:
    return {attributes: value for row, found in metrics.collect() if row.name == name
            for attributes, value in found.items()}


def told(source: BridgeSource, metrics: Metrics, now_ns: int) -> Poll:
    events = [*source.sample(now_ns), *source.availability()]
    metrics.fold(events)
    metrics.refresh(now_ns)
    assert isinstance(events[0], Poll)
    for name, attributes, _ in events[0].readings:
        assert len(attributes) == len(BY_NAME[name].attributes)
    return events[0]


def test_a_target_s_life(page: Page) -> None:
    """Not yet scraped, good, older, failed, good again: values only after a good scrape, age and up always."""
    clock, metrics, share = Clock(), Metrics(), "kvobs.engine.kv.utilization"
    scraper = Scraper(target_of(page.url), TRANSLATOR, 5.0, 5.0, clock)
    source = BridgeSource([scraper])
    target, subject = (page.name,), f"scrape {page.name}"

    told(source, metrics, clock.after(2))
    assert points(metrics, "kvobs.engine.up") == {target: 0.0}
    assert points(metrics, "kvobs.engine.age") == {target: 2.0}
    assert points(metrics, "kvobs.availability") == {(subject, f"{page.name} has not been scraped yet."): 0}
    assert points(metrics, share) == points(metrics, "kvobs.engine.scrape.duration") == {}

    scraper.once()
    told(source, metrics, clock.after(3))
    assert points(metrics, "kvobs.engine.up") == {target: 1.0}
    assert points(metrics, "kvobs.engine.age") == {target: 3.0}
    assert points(metrics, "kvobs.availability") == {(subject, ""): 1}
    assert list(points(metrics, share).values()) == [0.5]
    assert points(metrics, "kvobs.engine.scrape.series") == {
        (*target, "mapped"): 2.0, (*target, "ignored"): 1.0, (*target, "dropped"): 0.0}

    page.answer = text("busy", status=503)
    scraper.once()
    failed = told(source, metrics, clock.after(4))
    assert points(metrics, "kvobs.engine.up") == {target: 0.0}
    assert points(metrics, "kvobs.engine.age") == {target: 7.0}
    assert points(metrics, share) == points(metrics, "kvobs.engine.scrape.series") == {}
    assert points(metrics, "kvobs.availability") == {(subject, f"{page.name} answered 503, not 200."): 0}
    assert "kvobs.engine.preemptions" not in {name for name, _, _ in failed.readings}

    page.answer = text(PAGE.replace(" 0.5", " 0.25") + "vllm:num_requests_running NaN\n")
    scraper.once()
    told(source, metrics, clock.after(1))
    assert list(points(metrics, share).values()) == [0.25]
    assert points(metrics, "kvobs.engine.scrapes") == {(*target, "good"): 2.0, (*target, "failed"): 1.0}
    assert points(metrics, "kvobs.engine.scrape.dropped") == {(*target, "not_finite"): 1.0}
    assert points(metrics, "kvobs.engine.requests") == {}


def test_a_scraped_counter_is_absent_while_its_target_is_and_keeps_its_total(page: Page) -> None:
    """A counter vanishes with its target instead of going flat, and an engine's restart adds its new count."""
    clock, metrics = Clock(), Metrics()
    scraper = Scraper(target_of(page.url), TRANSLATOR, 5.0, 5.0, clock)
    source = BridgeSource([scraper])
    seen = []
    for answer in ("6", "", "8", "1"):
        page.answer = text(PAGE.replace("} 6", "} " + answer)) if answer else text("", status=503)
        scraper.once()
        told(source, metrics, clock.after(1))
        seen.append(list(points(metrics, "kvobs.engine.preemptions").values()))
    assert seen == [[6.0], [], [8.0], [9.0]]


def test_a_target_that_hangs_is_not_up(page: Page) -> None:
    """A fetch that outlives its timeout makes the last values absent, though its thread has not come back."""
    clock, held = Clock(), threading.Event()
    scraper = Scraper(target_of(page.url), TRANSLATOR, 0.01, 5.0, clock)
    source = BridgeSource([scraper])
    scraper.once()

    def hang(request: BaseHTTPRequestHandler) -> None:
        held.wait(20)

    page.answer = hang
    source.install(lambda event: None)
    try:
        wait_until(lambda: len(page.asked) == 2, what="The second request")
        assert scraper.outcome(clock.after(6)).up
        hanging = scraper.outcome(clock.after(2))
        assert (hanging.up, hanging.reason) == (False, f"{page.name} keeps the connection open and does not answer.")
    finally:
        source.uninstall()
        held.set()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvobs-bridge"]
