"""The demo's conversation with a tiny random model, through the same code as the real one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")

from kvobs import runtime
from kvobs.lab.demo import _chat, _script, run
from kvobs.store import StoreReader
from tests.support import ROOT, child_environment, wait_until

pytestmark = pytest.mark.torch

LAYERS, KV_HEADS, HEAD = 3, 2, 8
BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD * 4
KEYS = ["conversation", "turn", "session", "device", "prompt_tokens", "new_tokens", "kv_bytes", "kv_largest_bytes",
        "article_fragmentation_rate", "reallocations", "bytes_written", "bytes_copied", "migrations",
        "bytes_migrated", "ttft_s", "tpot_s", "allocator", "next_step", "model", "text"]
TEMPLATE = ("{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
            "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")


def make_tiny(directory: Path, context: int) -> Path:
    """A random Llama and a tokenizer whose words are those of the script."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    words = sorted({word for spoken in _script.schedule(_script.MOST_TURNS)
                    for word in re.findall(r"\w+|[^\w\s]+", spoken.line)})
    vocabulary = {word: number for number, word in enumerate([*special, "user", "assistant", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>",
                                   pad_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=HEAD, max_position_embeddings=context,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.4)).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def none_unobserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of so small a model are short: on a busy machine the overhead guard would pause."""
    monkeypatch.setenv("KVOBS_OVERHEAD_PERCENT", "100")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-chat", context=4096)


class Plain:
    """The same conversations without kvobs: texts, and per turn (cached before, prompt, cached after, new) tokens."""

    def __init__(self, model: Path, turns: int) -> None:
        self.spoken = list(_script.schedule(turns))
        self.texts: list[str] = []
        self.counts: list[tuple[int, int, int, int]] = []
        with _chat.one_thread():
            loaded = _chat.Model(model)
            lengths = self._watch_generate(loaded)
            chats = {name: _chat.Chat(loaded) for name in (_script.MAIN, *_script.SIDES)}
            for _, name, line, new_tokens in self.spoken:
                cached = chats[name].cache.get_seq_length()
                self.texts.append(chats[name].say(line, new_tokens))
                prompt, output = lengths[-1]
                self.counts.append((cached, prompt, chats[name].cache.get_seq_length(), output - prompt))

    def of(self, conversation: str) -> list[tuple[int, int, int, int]]:
        return [counts for spoken, counts in zip(self.spoken, self.counts, strict=True)
                if spoken.conversation == conversation]

    def _watch_generate(self, model: Any) -> list[tuple[int, int]]:
        lengths: list[tuple[int, int]] = []
        generate = model.on["cpu"].generate

        def watched(ids: Any, **kwargs: Any) -> Any:
            output = generate(ids, **kwargs)
            lengths.append((ids.shape[1], output.shape[1]))
            return output

        model.on["cpu"].generate = watched
        return lengths


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Plain:
    return Plain(tiny, 8)


def demo_json(capfd: pytest.CaptureFixture[str], model: Path, turns: int) -> list[dict[str, Any]]:
    assert run(turns, as_json=True, model=model, device="cpu") == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_json_prints_one_object_per_turn_and_nothing_else(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every line of stdout is an object with exactly the promised keys, numbered from 1 in each session."""
    found = demo_json(capfd, tiny, 3)
    assert [list(line) for line in found] == [KEYS] * 6
    assert [(line["conversation"], line["session"], line["turn"]) for line in found] == [
        ("garden", "garden", 1), ("travel", "travel", 1), ("garden", "garden", 2), ("letter", "letter", 1),
        ("garden", "garden", 3), ("travel", "travel", 2)]
    assert all(0 < line["tpot_s"] < 60 and 0 < line["ttft_s"] < 60 for line in found)


def test_on_the_cpu_the_allocator_is_the_heap_and_the_rest_is_absent(tiny: Path, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch,
                                                                     capfd: pytest.CaptureFixture[str]) -> None:
    """What is printed of the heap is what the store holds; what only a device's allocator has is None."""
    monkeypatch.setenv("KVOBS_STORE", str(tmp_path / "kept"))
    found = demo_json(capfd, tiny, 1)
    points: dict[str, set[float]] = {"allocated": set(), "unused": set()}
    for point in StoreReader(tmp_path / "kept").points("kvobs.allocator.usage"):
        points[point.attributes["state"]].add(point.value)
    for line in found:
        allocator = line["allocator"]
        assert line["device"] == "cpu"
        assert allocator["allocated_bytes"] in points["allocated"]
        assert allocator["reserved_bytes"] - allocator["allocated_bytes"] in points["unused"]
        assert {allocator[name] for name in ("largest_free_bytes", "article_rate", "gmlake", "unused_share")} == {None}
        assert line["next_step"]["verdict"] is None
        assert line["next_step"]["sentence"].endswith(".")


def test_the_figures_are_the_closed_forms(tiny: Path, plain: Plain, capfd: pytest.CaptureFixture[str]) -> None:
    """Per turn: 2 x layers re-allocations per forward pass, bytes = tokens x bytes per token, copies a series."""
    found = demo_json(capfd, tiny, 8)
    for line, (before, prompt, after, new) in zip(found, plain.counts, strict=True):
        assert line["prompt_tokens"] == prompt
        assert line["new_tokens"] == new
        assert line["reallocations"] == 2 * LAYERS * new
        assert line["kv_bytes"] == BYTES_PER_TOKEN * after
        assert line["kv_largest_bytes"] == BYTES_PER_TOKEN * after // (2 * LAYERS)
        assert line["article_fragmentation_rate"] == pytest.approx(1 - 1 / (2 * LAYERS))
        assert line["bytes_written"] == BYTES_PER_TOKEN * (after - before)
        assert line["bytes_copied"] == BYTES_PER_TOKEN * (before + sum(range(prompt, after)))
        assert line["migrations"] == 0
    amplification = [line["bytes_copied"] / line["bytes_written"] for line in found
                     if line["conversation"] == _script.MAIN]
    assert amplification[-1] > 2 * amplification[0]


def test_only_new_tokens_are_prefilled(plain: Plain) -> None:
    """The cache of a turn begins where the turn before ended, and each turn's passes are one per new token."""
    for conversation in (_script.MAIN, *_script.SIDES):
        for (_, _, after, _), (before, _, _, _) in pairwise(plain.of(conversation)):
            assert before == after
    for _, prompt, after, new in plain.counts:
        assert after == prompt + new - 1


def test_the_same_words_with_and_without_kvobs(tiny: Path, plain: Plain, capfd: pytest.CaptureFixture[str]) -> None:
    """Observing changes no reply."""
    assert [line["text"] for line in demo_json(capfd, tiny, 8)] == plain.texts


@pytest.mark.parametrize("last", [None, 2], ids=["cut off", "ended"])
def test_the_new_part_of_a_prompt_continues_the_tokens(tiny: Path, last: int | None) -> None:
    """Whether replies end or are cut off, the model is fed the template's rendering of the whole conversation."""
    with _chat.one_thread():
        model = _chat.Model(tiny)
        chat = _chat.Chat(model)
        # Special tokens within a reply have no text, so that a rendering could not show them.
        model.on["cpu"].generation_config.suppress_tokens = [0, 1] if last is not None else [0, 1, 2]
        model.on["cpu"].generation_config.forced_eos_token_id = last
        for line in _script.lines(4):
            chat.say(line, 12)
    whole = model.tokenizer.apply_chat_template(chat._messages, tokenize=True, return_dict=False)
    # The rendering ends with the end-of-turn token, which belongs to the next turn's new part.
    assert chat.tokens == list(whole)[:-1]


def test_the_terminal_shows_conversations_tables_and_places(tiny: Path, plain: Plain, tmp_path: Path,
                                                            capfd: pytest.CaptureFixture[str]) -> None:
    """First the device, then each line and reply in order, a row per turn in both tables, and where everything is."""
    assert run(2, model=tiny, device="cpu") == 0
    out = capfd.readouterr().out
    assert out.startswith("Device: cpu, as asked for: compute and memory are this machine's.\n")
    position = 0
    for spoken, text in zip(plain.spoken, plain.texts[:4], strict=False):
        position = out.index(f"[{spoken.conversation}, cpu]\nYou: {spoken.line}\nModel: {text}", position)
    first, second = out[out.index("What the allocator held"):].split("What each turn did")
    rows = [[row.split() for row in table.splitlines() if re.match(r"\s*\d+ (garden|travel|letter) ", row)]
            for table in (first, second)]
    assert [row[:3] for row in rows[0]] == [["1", "garden", "cpu"], ["1", "travel", "cpu"], ["2", "garden", "cpu"],
                                            ["1", "letter", "cpu"]]
    assert [row[:4] for row in rows[1]] == [
        [str(number), name, str(prompt), str(new)] for (number, name), (_, prompt, _, new) in zip(
            ((1, "garden"), (1, "travel"), (2, "garden"), (1, "letter")), plain.counts[:4], strict=True)]
    assert re.search(r"^Metrics: http://127\.0\.0\.1:\d+/metrics ", second, re.MULTILINE)
    assert re.search(r"^Traces: The store holds .*OTEL_EXPORTER_OTLP_ENDPOINT", second, re.MULTILINE)
    assert f"\nStore: {tmp_path / 'state' / 'kvobs' / 'store'} " in second


def test_the_store_keeps_the_turns(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capfd: pytest.CaptureFixture[str]) -> None:
    """What was printed is what the store of the setting holds afterwards."""
    monkeypatch.setenv("KVOBS_STORE", str(tmp_path / "kept"))
    found = demo_json(capfd, tiny, 2)
    kept = [stored.record for stored in StoreReader(tmp_path / "kept").turns()]
    assert [(turn.turn, turn.session, turn.bytes_copied, turn.origin.model) for turn in kept] == [
        (line["turn"], line["session"], line["bytes_copied"], "tiny-chat") for line in found]


def test_without_a_store_the_figures_are_there_all_the_same(tiny: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch,
                                                            capfd: pytest.CaptureFixture[str]) -> None:
    """With the store off the demo works, says so, and leaves no file in the default place."""
    monkeypatch.setenv("KVOBS_STORE", "off")
    assert run(1, model=tiny, device="cpu") == 0
    assert "Store: off, as configured" in capfd.readouterr().out
    assert not (tmp_path / "state").exists()


def test_beyond_the_context_a_new_session_begins(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model of 256 positions is never fed more: the conversation begins anew, as turn 1 of another session."""
    found = [line for line in demo_json(capfd, make_tiny(tmp_path / "small", context=256), 6)
             if line["conversation"] == _script.MAIN]
    assert all(line["prompt_tokens"] + line["new_tokens"] <= 256 for line in found)
    sessions = list(dict.fromkeys(line["session"] for line in found))
    assert len(sessions) > 1
    assert sessions == ["garden", *(f"garden {number}" for number in range(2, len(sessions) + 1))]
    for session in sessions:
        turns = [line["turn"] for line in found if line["session"] == session]
        assert turns == list(range(1, len(turns) + 1))


@pytest.mark.parametrize("turns", [0, -1, 65])
def test_a_number_of_turns_out_of_range_is_refused(turns: int, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence says what is allowed, the exit code is 2, and nothing was started."""
    assert run(turns) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"kvobs: The demo's number of turns is {turns}; allowed is 1 to 64.\n"


def test_a_device_that_is_not_known_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence says what is allowed, and the exit code is 2."""
    assert run(1, device="cuda") == 2
    assert capfd.readouterr().err == "kvobs: --device: 'cuda' is not known; allowed are auto, cpu, vgpu.\n"


def test_without_a_virtual_gpu_it_says_why(tiny: Path, monkeypatch: pytest.MonkeyPatch,
                                           capfd: pytest.CaptureFixture[str]) -> None:
    """auto goes on on the CPU and says why in its first line; vgpu is refused with the same sentence."""
    monkeypatch.setenv("KVOBS_NATIVE", "off")
    why = "The virtual GPU is compiled C++, which is switched off (native=off)."
    assert run(1, model=tiny) == 0
    assert capfd.readouterr().out.splitlines()[0] == (
        f"Device: cpu, compute and memory are this machine's. {why}")
    assert run(1, model=tiny, device="vgpu") == 2
    assert capfd.readouterr().err.splitlines()[-1] == f"kvobs: {why}"


def test_the_script_cycles_through_follow_ups() -> None:
    """Any allowed number of turns has a line each, the scripted eight first, and another conversation after each."""
    for turns in (1, 8, 9, 64):
        lines = list(_script.lines(turns))
        assert len(lines) == turns
        assert lines[:8] == list(_script.LINES[:turns])
        assert all(lines)
        spoken = list(_script.schedule(turns))
        assert [one.line for one in spoken[::2]] == lines
        assert [one.conversation for one in spoken[1::2]] == (["travel", "letter"] * turns)[:turns]
        assert [one.round for one in spoken] == sorted([*range(1, turns + 1)] * 2)


def test_kvobs_switched_off_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch,
                                       capfd: pytest.CaptureFixture[str]) -> None:
    """The demo shows kvobs; with kvobs off it says so and exits 2."""
    monkeypatch.setenv("KVOBS_ENABLED", "false")
    assert run(1, model=tiny, device="cpu") == 2
    assert "the setting enabled switches it off." in capfd.readouterr().err


def test_a_runtime_that_was_there_is_left_running(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Below `kvobs run` the demo reports through the runtime of the process and does not stop it."""
    there = runtime.start()
    try:
        assert len(demo_json(capfd, tiny, 1)) == 2
        assert runtime.current() is there
    finally:
        runtime.stop()


def test_torch_threads_are_given_back(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The demo's own number of threads is no longer in force afterwards."""
    torch.set_num_threads(2)
    try:
        demo_json(capfd, tiny, 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# The tests themselves may run in the background with SIGINT ignored, which children inherit.
LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
CHILD = "import sys; from pathlib import Path; from kvobs.lab.demo import run; " \
        "sys.exit(run(64, as_json=True, model=Path(sys.argv[1]), device='cpu'))"


def test_an_interrupt_ends_it_quietly_and_flushed(tiny: Path, tmp_path: Path) -> None:
    """Ctrl-C within a turn: exit code 130, no traceback, and every printed turn is in a store that was finished."""
    settings = {"XDG_STATE_HOME": str(tmp_path / "child"), "KVOBS_PROMETHEUS": "127.0.0.1:0", "HF_HUB_OFFLINE": "1",
                "KVOBS_OVERHEAD_PERCENT": "100"}
    output, errors = tmp_path / "out", tmp_path / "err"
    with output.open("wb") as out, errors.open("wb") as err, subprocess.Popen(
            [sys.executable, "-c", LISTENING + CHILD, str(tiny)], env=child_environment(**settings), cwd=ROOT,
            stdout=out, stderr=err, stdin=subprocess.DEVNULL) as child:
        try:
            wait_until(lambda: output.read_text().count("\n") >= 2, 120, "the second turn")
            child.send_signal(signal.SIGINT)
            assert child.wait(60) == 130
        finally:
            child.kill()
    assert errors.read_text().endswith("kvobs: Interrupted.\n")
    assert "Traceback" not in errors.read_text()
    printed = [json.loads(line) for line in output.read_text().splitlines()]
    reader = StoreReader(tmp_path / "child" / "kvobs" / "store")
    kept = [stored.record for stored in reader.turns() if stored.record.outcome == "ok"]
    assert [turn.bytes_copied for turn in kept][:len(printed)] == [line["bytes_copied"] for line in printed]
    assert [process.ended_wall_ns is not None for process in reader.processes()] == [True]


def test_a_reader_that_leaves_ends_it_quietly(tiny: Path, tmp_path: Path) -> None:
    """`kvobs demo --json | head -1` shows no traceback."""
    settings = {"XDG_STATE_HOME": str(tmp_path / "child"), "KVOBS_PROMETHEUS": "127.0.0.1:0", "HF_HUB_OFFLINE": "1",
                "KVOBS_OVERHEAD_PERCENT": "100"}
    errors = tmp_path / "err"
    with errors.open("wb") as err, subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tiny)], env=child_environment(**settings), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=err, stdin=subprocess.DEVNULL) as child:
        try:
            assert child.stdout is not None
            assert json.loads(child.stdout.readline())["turn"] == 1
            child.stdout.close()
            assert child.wait(120) == 1
        finally:
            child.kill()
    assert "Traceback" not in errors.read_text()
