"""``kvobs bridge``'s arguments, and what --once shows; how it runs is in the integration tests."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kvobs.cli import main
from tests.served_page import Page, served, text
from tests.support import free_port


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    code = main(["bridge", *arguments])
    return code, *capsys.readouterr()


@pytest.fixture
def page() -> Iterator[Page]:
    with served(text("".join(f'vllm:kv_cache_usage_perc{{engine="{rank}",model_name="m"}} 0.5\n'
                             f'vllm:num_preemptions_total{{engine="{rank}",model_name="m"}} {6 + rank}\n'
                             for rank in (0, 1)))) as found:
        yield found


def test_once_shows_one_scrape(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """--once prints what the page means as a table or as JSON, and ends with 0."""
    code, out, err = run(capsys, "--scrape", page.url, "--once")
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if "ranks=dp=1" in line and "preemptions" in line)
    assert row.split() == ["kvobs.engine.preemptions", "engine=vllm", "model=m", "ranks=dp=1", "7", "{request}"]
    assert out.splitlines()[-1] == f"{page.name}: 4 samples mapped, 0 ignored."
    told = json.loads(run(capsys, "--scrape", page.url, "--once", "--json")[1])
    assert [one["value"] for one in told[0]["readings"] if one["metric"] == "kvobs.engine.preemptions"] == [6.0, 7.0]
    assert (told[0]["target"], told[0]["up"], told[0]["mapped"]) == (page.name, True, 4)


def test_once_fails_with_the_reason(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """A scrape that fails is exit code 2 and one sentence on stderr; what else could be had is shown."""
    gone = f"127.0.0.1:{free_port()}"
    code, out, err = run(capsys, "--scrape", page.url, "--scrape", f"http://{gone}", "--once")
    assert (code, err) == (2, f"kvobs: {gone} cannot be reached (connection refused).\n")
    assert "kvobs.engine.preemptions" in out


def test_once_fails_where_nothing_is_known(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """A page of another program is exit code 2 and one sentence, and no empty table."""
    page.answer = text("up 1\nfoo_total 3\n")
    assert run(capsys, "--scrape", page.url, "--once") == (
        2, "", f"kvobs: {page.name} answers, but none of its 2 samples is known.\n")


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--scrape", "localhost:8000"], "The address 'localhost:8000' is not one that can be scraped"),
    (["--scrape", "http://h", "--scrape", "http://h:80/metrics"], "names an address twice"),
    (["--scrape", "http://h", "--json"], "--json belongs to --once"),
    (["--scrape", "http://h", "--map", "/nowhere.toml"], "The mapping table /nowhere.toml cannot be read"),
    (["--scrape", "http://h", "--prometheus", "nonsense"], "The setting 'prometheus'"),
    ([word for at in range(65) for word in ("--scrape", f"http://h{at}")], "names 65 addresses; one bridge takes 64"),
])
def test_bad_arguments_are_refused_in_one_sentence(arguments: list[str], sentence: str,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be meant is exit code 2 and one sentence, before anything is opened."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
