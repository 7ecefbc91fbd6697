"""``kvobs view`` in a real browser, over processes that are being observed at that moment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("streamlit", reason="streamlit is not installed: pip install 'kvobs[app]'")

from kvobs.lab.demo._cache import NAME
from kvobs.store import StoreReader
from tests.browser import Window, browsing, viewing
from tests.integration.test_demo import make_tiny
from tests.integration.test_demo_smollm2 import MODEL, why_not
from tests.support import ROOT, child_environment, wait_until

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.peer]

# The demo's own parts, one turn per line of stdin, so that a test decides when something happens.
DEMO = """
import json, sys
from pathlib import Path
from kvobs.lab.demo import _chat, _script
from kvobs.lab.demo._allocator import Held
from kvobs.lab.demo._observer import Observer
from kvobs.lab.demo._report import record
observer = Observer(deep=True)
chat = _chat.Chat(_chat.Model(Path(sys.argv[1])))
print("ready", flush=True)
with _chat.one_thread():
    for line in sys.stdin:
        text = chat.say(line.strip(), _script.NEW_TOKENS)
        told = record(observer.turn(), text, "garden", Held(), observer.verdict("cpu"), observer.migrations())
        print(json.dumps(told), flush=True)
"""


class Demo:
    """An observed conversation with a tiny model in a process of its own."""

    def __init__(self, model: Path, store: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DEMO, str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=ROOT, env=child_environment(KVOBS_STORE=str(store), KVOBS_PROMETHEUS="off",
                                            KVOBS_OVERHEAD_PERCENT="100"))
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def say(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


# A process that knows nothing of kvobs: it decodes without end, one turn after the other.
SERVING = """
import os, torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                                     num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=None,
                                     pad_token_id=0)).eval()
print(os.getpid(), flush=True)
while True:
    model.generate(torch.tensor([[1, 2, 3]]), past_key_values=DynamicCache(config=model.config), max_new_tokens=1500,
                   do_sample=False)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-chat", context=4096)


@pytest.fixture
def demo(model: Path, tmp_path: Path) -> Iterator[Demo]:
    found = Demo(model, tmp_path / "store")
    yield found
    found.kill()


def harmless(window: Window) -> None:
    """Nothing was asked of another machine, and nothing went wrong in the page."""
    assert {url.split("/")[2].split(":")[0] for url in window.asked if "//" in url} == {"127.0.0.1"}
    assert window.errors == []


def shown(told: dict[str, Any]) -> dict[str, str]:
    """What the Turns page must say of a turn that the demo told."""
    return {"turn": str(told["turn"]), "prompt": str(told["prompt_tokens"]), "new": str(told["new_tokens"]),
            "KV held": f"{told['kv_bytes']:,} B", "largest buffer": f"{told['kv_largest_bytes']:,} B",
            "fragmentation (article)": f"{100 * told['article_fragmentation_rate']:.1f} %", "outcome": "ok"}


def agrees(window: Window, turns: list[dict[str, Any]]) -> bool:
    sizes, work = window.table(0), window.table(1)
    return (len(sizes) == len(work) == len(turns)
            and all(row | shown(told) == row for row, told in zip(sizes, turns, strict=True))
            and all((row["turn"], row["re-allocations"], row["migrations"]) == (
                str(told["turn"]), str(told["reallocations"]), str(told["migrations"]))
                for row, told in zip(work, turns, strict=True)))


def newest(store: Path, metric: str, **attributes: str) -> float:
    points = StoreReader(store).points(metric)
    return [point.value for point in points if attributes.items() <= point.attributes.items()][-1]


def test_the_pages_say_what_the_demo_and_the_store_say(demo: Demo, tmp_path: Path) -> None:
    """Figures and tables equal the store's points and the demo's own JSON while it runs; stale when it was killed."""
    store = tmp_path / "store"
    turns = [demo.say("What grows well in a small garden?")]
    with viewing(store) as address, browsing() as window:
        window.page.goto(address)
        wait_until(lambda: window.figure("kv-held") == f"{turns[0]['kv_bytes']:,} B", what="the first turn's KV bytes")
        assert newest(store, "kvobs.kv.usage", state="held") == turns[0]["kv_bytes"]
        assert window.state().startswith("Live: the last sample is ")
        wait_until(lambda: (window.figure("caches"), window.figure("dropped"), window.figure("kv-slack")) == (
            "1", "0", "0 B"), what="the other figures")
        window.open("Turns")
        wait_until(lambda: agrees(window, turns), what="the first turn in the tables")
        turns.append(demo.say("And what should I plant in the shade?"))
        wait_until(lambda: agrees(window, turns), what="the second turn in the tables")
        window.open("Attention")
        wait_until(lambda: window.page.get_by_text("Sampled: one of").count(), what="sampled attention")
        last = StoreReader(store).attention()[-1].record
        metric = window.page.locator(".st-key-figure-full-pending [data-testid=stMetricValue]")
        wait_until(lambda: metric.first.inner_text() == f"{last.pending:,} of {last.blocks:,}", what="the last sample")
        window.open("Live")
        wait_until(lambda: window.figure("kv-held") == f"{turns[1]['kv_bytes']:,} B", what="the second turn's KV bytes")
        demo.kill()
        wait_until(lambda: window.state().startswith("The process has ended"), what="the stale state")
        assert window.figure("kv-held") == f"{turns[1]['kv_bytes']:,} B"
        harmless(window)


def test_a_process_that_begins_later_appears(model: Path, tmp_path: Path) -> None:
    """A view over an empty directory says so; a second process of the directory can be picked, and so can all."""
    store = tmp_path / "store"
    store.mkdir()
    with viewing(store) as address, browsing() as window:
        window.page.goto(address)
        window.page.get_by_text("There is no store in").wait_for(timeout=30_000)
        window.page.get_by_text("kvobs run -- python serve.py", exact=True).wait_for(timeout=30_000)
        processes = [Demo(model, store), Demo(model, store)]
        try:
            told = [process.say("What grows well?") for process in processes]
            window.page.reload()
            picker = window.page.locator("[data-testid=stSelectbox]").first
            picker.wait_for(timeout=30_000)
            picker.click()
            window.page.get_by_role("option", name="All 2 processes").click()
            total = sum(turn["kv_bytes"] for turn in told)
            wait_until(lambda: window.figure("kv-held") == f"{total:,} B", what="the bytes of both processes")
        finally:
            for process in processes:
                process.kill()


def test_a_process_below_kvobs_run_is_followed_live(tmp_path: Path) -> None:
    """While `kvobs run -- python` decodes, the page's KV bytes follow the store's; once it was killed it says so."""
    store = tmp_path / "store"
    serving = subprocess.Popen(
        [sys.executable, "-m", "kvobs", "run", "--deep", "--store", store, "--", sys.executable, "-c", SERVING],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=child_environment(KVOBS_PROMETHEUS="off"))
    try:
        assert serving.stdout is not None
        assert int(serving.stdout.readline()) == serving.pid
        followed: set[str] = set()
        with viewing(store) as address, browsing() as window:
            window.page.goto(address)

            def follows() -> bool:
                before = window.figure("kv-held")
                if before and before == f"{newest(store, 'kvobs.kv.usage', state='held'):,.0f} B":
                    followed.add(before)
                return len(followed) >= 3

            wait_until(follows, 60, "the page and the store saying the same three times")
            assert window.state().startswith("Live: the last sample is ")
            serving.kill()
            serving.wait(30)
            wait_until(lambda: window.state().startswith("The process has ended"), what="the stale state")
            assert window.figure("kv-held") == f"{newest(store, 'kvobs.kv.usage', state='held'):,.0f} B"
            harmless(window)
    finally:
        serving.kill()
        serving.communicate()


LUMINANCE = """
element => {
    const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const over = ([r, g, b, a = 1], ground) => [r, g, b].map((v, i) => v * a + ground[i] * (1 - a));
    const layers = [];
    for (let box = element; box; box = box.parentElement) layers.push(parse(getComputedStyle(box).backgroundColor));
    const white = [255, 255, 255];
    const ground = layers.reverse().reduce((below, layer) => layer.length ? over(layer, below) : below, white);
    const mixed = over(parse(getComputedStyle(element).color), ground);
    const [high, low] = [light(mixed), light(ground)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
}
"""


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_are_legible_and_keyboards_reach_everything(demo: Demo, tmp_path: Path, dark: bool) -> None:
    """Figures have at least 4.5:1 against their ground in both themes; Tab reaches navigation, picker and range."""
    demo.say("What grows well?")
    with viewing(tmp_path / "store") as address, browsing(dark=dark, width=900) as window:
        window.page.goto(address)
        wait_until(lambda: window.figure("kv-held"), what="the figures")
        for place in ("[data-testid=stMetricValue] div", "[data-testid=stMetricLabel] p", ".st-key-state p",
                      "[data-testid=stSidebarNavLink] span"):
            assert window.page.locator(place).first.evaluate(LUMINANCE) >= 4.5, place
        reached = set()
        for _ in range(30):
            window.page.keyboard.press("Tab")
            reached.add(window.page.evaluate("""() => { const e = document.activeElement;
                return e.dataset.testid || e.getAttribute('role') || e.type || e.tagName }"""))
        assert {"stSidebarNavLink", "combobox", "radio"} <= reached, reached
        overflow = window.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0


def test_traces_are_links_where_an_address_is_set(demo: Demo, tmp_path: Path) -> None:
    """With KVOBS_JAEGER_URL each turn's trace id is a link into Jaeger."""
    demo.say("What grows well?")
    (turn,) = StoreReader(tmp_path / "store").turns()
    assert turn.record.trace_id
    with viewing(tmp_path / "store", KVOBS_JAEGER_URL="http://127.0.0.1:1/jaeger/") as address, browsing() as window:
        window.page.goto(address)
        window.open("Turns")
        link = window.page.get_by_role("link", name="Trace of turn 1")
        link.wait_for(timeout=30_000)
        assert link.get_attribute("href") == f"http://127.0.0.1:1/jaeger/trace/{turn.record.trace_id}"


def test_the_real_demo(tmp_path: Path) -> None:
    """While SmolLM2 holds its conversation, the pages say each turn as the demo's JSON does, and then that it ended."""
    if why_not():
        pytest.skip(why_not())
    store = tmp_path / "store"
    demo = subprocess.Popen(
        [sys.executable, "-m", "kvobs", "demo", "--json", "--turns", "2", "--deep", "--device", "cpu"],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, stderr=subprocess.DEVNULL, env=child_environment(
            KVOBS_STORE=str(store), KVOBS_PROMETHEUS="off", XDG_CACHE_HOME=str(Path(MODEL).parents[2])))
    try:
        assert demo.stdout is not None
        turns = [json.loads(demo.stdout.readline())]
        assert json.loads(demo.stdout.readline())["session"] == "travel"  # beside which the main one goes on
        with viewing(store) as address, browsing() as window:
            window.page.goto(address)
            wait_until(lambda: window.state().startswith("Live"), what="the live page")
            assert NAME in str(StoreReader(store).turns()[0].record.origin.model)
            window.open("Turns")
            window.page.get_by_role("combobox", name="Session").click()
            window.page.get_by_role("option", name="garden", exact=True).click()
            wait_until(lambda: agrees(window, turns), what="the first turn")
            turns.append(json.loads(demo.stdout.readline()))
            wait_until(lambda: agrees(window, turns), what="the second turn")
            assert json.loads(demo.stdout.readline())["session"] == "letter"
            assert demo.wait(60) == 0
            window.open("Live")
            wait_until(lambda: window.state().startswith("The process has ended"), what="the stale state")
            harmless(window)
    finally:
        demo.kill()
        demo.communicate()
