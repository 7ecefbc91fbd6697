"""The report in a real browser, opened from the disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator.explain import explain
from kvobs.allocator.readers import read
from kvobs.allocator.report import page_data, page_of, write_html
from kvobs.allocator.settings import MIB, Settings
from kvobs.allocator.state import ALLOCATED
from tests.browser import Window, browsing, viewing
from tests.recordings import STEPS, dump, recorded

HOSTILE = "</script><img src=x onerror='document.title=`taken`'><script>document.title='taken'</script>"
CONTRAST = """() => {
  const channel = (value) => value <= .03928 * 255 ? value / 255 / 12.92 : ((value / 255 + .055) / 1.055) ** 2.4;
  const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number);
    return .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b); };
  const ground = (node) => { for (let at = node; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (!/, 0\\)$/.test(colour) && colour !== "transparent") return colour; } return "rgb(255, 255, 255)"; };
  const texts = [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
    && !["SCRIPT", "STYLE", "OPTION"].includes(node.tagName)
    && [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()));
  return texts.map((node) => { const style = getComputedStyle(node);
    const ink = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(ink), light(ground(node))].sort((x, y) => y - x);
    return [node.textContent.trim().slice(0, 40), (a + .05) / (b + .05)]; });
}"""

BROKEN = """() => [...document.querySelectorAll("td:not(.label), th")].flatMap((cell) => {
  const found = [], texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  for (let text = texts.nextNode(); text; text = texts.nextNode())
    for (const word of text.data.matchAll(/[\\w.,]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((line) => line.top)).size > 1) found.push(word[0]);
    }
  return found; })"""
HIDDEN = """() => [...document.querySelectorAll(".table")].filter((node) => node.scrollWidth > node.clientWidth)
  .map((node) => node.getAttribute("aria-label"))"""


def made(folder: Path, function: str = "answer") -> Path:
    recording = recorded(folder / "made.pickle", function)
    told = explain(recording)
    write_html(recording, told.replays, told.document, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(params=[(1400, False), (1000, True), (1920, False)], ids=str)
def report(request: Any, tmp_path: Path) -> Iterator[Window]:
    width, dark = request.param
    with browsing(dark=dark, width=width) as window:
        window.page.goto(made(tmp_path).as_uri())
        window.page.locator("canvas").wait_for()
        yield window


def inside(window: Window, text: str) -> str:
    """The words of the section that a heading begins, up to the next one."""
    return str(window.page.evaluate("""(text) => { const found = [];
        let at = [...document.querySelectorAll("h3")].find((head) => head.textContent === text).nextElementSibling;
        for (; at && at.tagName !== "H3"; at = at.nextElementSibling) found.push(at.innerText);
        return found.join("\\n"); }""", text))


def test_a_report_reads_whole(report: Window) -> None:
    """From the disk, at several widths, light and dark: nothing is asked of anyone, nothing fails, nothing sticks out
    of the page, every text has a contrast of 4.5, and every section says something.
    """
    page = report.page
    assert [url for url in report.asked if not url.startswith("file:")] == []
    assert report.errors == []
    assert page.evaluate("() => document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.locator("details").evaluate_all("(all) => all.forEach((one) => { one.open = true; })")
    faint = [entry for entry in page.evaluate(CONTRAST) if entry[1] < 4.5]
    assert faint == []
    headings = page.locator("h3").all_inner_texts()
    assert len(headings) == 8
    for heading in headings:
        assert len(inside(report, heading)) > 60, heading


def test_a_narrow_report_reads_whole(tmp_path: Path) -> None:
    """At 600 pixels no table runs off the right edge, and no word in a cell is broken but those of long labels."""
    with browsing(width=600) as window:
        window.page.goto(made(tmp_path).as_uri())
        window.page.locator("canvas").wait_for()
        assert window.page.get_by_role("region", name="Pinned segments").count() == 1
        assert window.page.evaluate(HIDDEN) == []
        assert window.page.evaluate(BROKEN) == []
        window.page.set_viewport_size({"width": 260, "height": 900})
        assert "Pinned segments" in window.page.evaluate(HIDDEN)  # the probe can see what is too wide


def test_a_report_tells_the_files_truth(report: Window) -> None:
    """The verdict, the waste that sums to what is reserved, the score, and the holders are on the page in words."""
    verdict = inside(report, "Verdicts")
    assert "CAPACITY" in verdict
    assert "256.00 MiB requested" in verdict
    assert "8/8 addresses, 3/3 device allocations" in verdict
    assert "other settings would have done (modelled), the best of them included: kvobs whatif FILE --search" in verdict
    sums = re.search(r"sum to ([\d,]+) B of ([\d,]+) B", inside(report, "Where the reserved bytes are"))
    assert sums is not None
    assert sums[1] == sums[2] == f"{30 * MIB:,}"
    holders = inside(report, "Who holds memory")
    assert "kv: 6.00 MiB (37.5 %)" in holders
    assert "cache_utils.py:119 update (from serve.py:20 answer)" in holders
    assert "GMLake" in inside(report, "Published definitions of fragmentation, and why none decides")
    assert report.page.locator("line.oom").count() == 1


def test_the_slider_goes_through_time(report: Window) -> None:
    """With the keyboard the slider goes from the file's state back to before the first event; map, chart and words
    follow, and at the peak the last two KV tensors are there at once.
    """
    page = report.page
    slider, said = page.get_by_role("slider"), page.locator("output")
    assert said.inner_text().startswith("The file's last state: 30.00 MiB reserved, 16.00 MiB in 2 blocks")
    slider.focus()
    page.keyboard.press("Home")
    assert said.inner_text().startswith("Before the first event: 0 B reserved, 0 B in 0 blocks")
    page.keyboard.press("ArrowRight")
    assert said.inner_text().startswith("After event 0 of 25")
    page.get_by_role("button", name="Peak").click()
    largest = page.get_by_role("region", name="The largest blocks at this moment").locator("tbody tr")
    assert [row.split("\t")[1:4] for row in largest.all_inner_texts()] == [
        ["10.00 MiB", "allocated", "weights"], [f"{STEPS}.00 MiB", "allocated", "kv"],
        [f"{STEPS - 1}.00 MiB", "allocated", "kv"]]
    before = page.locator("line.cursor").get_attribute("x1")
    page.get_by_role("button", name="First").click()
    assert page.locator("line.cursor").get_attribute("x1") != before
    page.get_by_role("button", name="Last").click()
    page.locator("canvas").focus()
    page.keyboard.press("ArrowRight")
    assert "kind (estimated): weights" in page.locator(".map .hint").inner_text()


def test_pending_is_shown_as_such(report: Window) -> None:
    """Right after it was freed, the block that another stream still uses is on the map as pending."""
    page = report.page
    slider, said = page.get_by_role("slider"), page.locator("output")
    slider.focus()
    table = page.get_by_role("region", name="The largest blocks at this moment")
    for _ in range(25):
        page.keyboard.press("ArrowLeft")
        if "pending" in table.inner_text():
            break
    assert "3.00 MiB\tpending\tactivation" in table.inner_text(), said.inner_text()
    page.get_by_label("state", exact=True).check()
    assert "pending: 3.00 MiB" in page.locator(".legend").nth(1).inner_text()


def test_hovering_tells_size_kind_and_frame(report: Window) -> None:
    """Over the first block of the map the hint says its size, its kind and who allocated it; over free memory that."""
    page = report.page
    box = page.locator("canvas").bounding_box()
    assert box is not None
    page.locator("canvas").hover(position={"x": 200, "y": 5})
    hint = page.locator(".map .hint").inner_text()
    assert "10.00 MiB allocated" in hint
    assert "kind (estimated): weights" in hint
    assert "module.py:1357 convert" in hint
    page.locator("canvas").hover(position={"x": 200, "y": box["height"] - 5})
    assert "free, in a segment of 20.00 MiB" in page.locator(".map .hint").inner_text()


def test_an_address_that_is_not_known_is_not_told(tmp_path: Path) -> None:
    """Of blocks beyond the ranges whose addresses the page has, it says so; the others have their own addresses."""
    recording = recorded(tmp_path / "made.pickle")
    told = explain(recording)
    drawn = page_data(recording, told.replays, told.document)
    first, *_ = recording.devices[0].state
    (known,) = drawn["devices"][0]["map"]["ranges"]
    known[1] = first.size  # as if what follows was another range
    expected = sorted(hex(block.address) if segment is first else "not known"
                      for segment in recording.devices[0].state for block in segment.blocks if block.state == ALLOCATED)
    assert expected == [hex(first.address), "not known"]
    (tmp_path / "report.html").write_text(page_of(drawn), encoding="utf-8")
    with browsing() as window:
        window.page.goto((tmp_path / "report.html").as_uri())
        rows = window.page.get_by_role("region", name="The largest blocks at this moment").locator("tbody tr")
        rows.first.wait_for()
        assert sorted(row.split("\t")[0] for row in rows.all_inner_texts()) == expected


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """A function of the file that is called like markup with a script is shown as it is called, and nothing of it
    runs; the page makes no picture.
    """
    with browsing() as window:
        window.page.goto(made(tmp_path, HOSTILE).as_uri())
        window.page.locator("canvas").wait_for()
        assert window.page.title() == "kvobs explain"
        assert window.page.locator("img").count() == 0
        assert HOSTILE[:60] in window.page.locator("main").inner_text()
        assert window.errors == []


def test_the_policy_stops_what_escapes(tmp_path: Path) -> None:
    """Were markup of a file to reach the page all the same, its script would not run and its picture not be asked."""
    report = made(tmp_path)
    text = report.read_text(encoding="utf-8")
    report.write_text(text.replace("<main", "<img src='http://127.0.0.1:9/x' onerror=\"document.title='taken'\">"
                                   "<script>document.title='taken'</script><main", 1), encoding="utf-8")
    with browsing() as window:
        window.page.goto(report.as_uri())
        window.page.locator("canvas").wait_for()
        assert window.page.title() == "kvobs explain"
        assert any("script" in error and "Content Security Policy" in error for error in window.errors)
        assert any("http://127.0.0.1:9/x" in error and "Content Security Policy" in error for error in window.errors)


def test_the_explain_page_draws_the_map(tmp_path: Path) -> None:
    """``kvobs view`` over an empty directory explains a file by its path: verdict, map and slider are there, names of
    the file are text, and nobody but this machine is asked.
    """
    store = tmp_path / "store"
    store.mkdir()
    file = dump(tmp_path / "made.pickle", HOSTILE)
    with viewing(store) as address, browsing() as window:
        window.page.goto(address)
        window.open("Explain")
        window.page.get_by_label("Path").fill(str(file))
        window.page.keyboard.press("Enter")
        window.page.get_by_text("CAPACITY").first.wait_for(timeout=60_000)
        assert window.figure("reserved") == f"{30 * MIB:,} B"
        frame = window.page.frame_locator("iframe").first
        frame.locator("canvas").wait_for(timeout=60_000)
        assert frame.locator("output").inner_text().startswith("The file's last state: 30.00 MiB reserved")
        assert HOSTILE[:60] in window.page.locator("[data-testid=stTable]").nth(1).inner_text()
        assert window.page.locator("img[src='x']").count() + frame.locator("img").count() == 0
        assert [url for url in window.asked if "127.0.0.1" not in url and not url.startswith(("data:", "about:"))] == []
        assert window.errors == []


def test_two_sessions_explain_two_files(tmp_path: Path) -> None:
    """Two people at once, each with a file: both searches end, and each sees the figures and the settings of the own
    file only.
    """
    store = tmp_path / "store"
    store.mkdir()
    files = [dump(tmp_path / "plain.pickle"),
             dump(tmp_path / "paged.pickle", settings=Settings(expandable_segments=True))]
    with viewing(store) as address, browsing() as first:
        second = Window(first.page.context.browser.new_context().new_page())
        windows = (first, second)
        for window, file in zip(windows, files, strict=True):
            window.page.goto(address)
            window.open("Explain")
            window.page.get_by_label("Path").fill(str(file))
            window.page.keyboard.press("Enter")
        for window in windows:
            window.page.get_by_role("button", name="Find the best settings").click(timeout=60_000)
        for window, file, settings in zip(windows, files, ("the defaults", "expandable_segments:True"), strict=True):
            window.page.get_by_text("settings that were tried (modelled)").wait_for(timeout=60_000)
            window.page.get_by_text(f"{file.name}: ").wait_for()
            reserved = sum(segment.size for segment in read(file).devices[0].state)
            assert window.figure("reserved") == f"{reserved:,} B"
            compared = window.page.locator("[data-testid=stTable]", has_text="KV growth")
            compared.wait_for(timeout=30_000)
            assert settings in compared.locator("tr", has_text="settings").first.inner_text()
            assert window.page.locator("[data-testid=stException]").count() == 0
            assert window.errors == []
