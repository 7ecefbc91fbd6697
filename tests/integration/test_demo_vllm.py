"""The demo with a real vLLM, once, with a tiny random model: what is printed fits together and is under pressure."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvobs[torch]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'kvobs[torch]'")

from kvobs.lab.demo import _vllm_env, run_vllm
from kvobs.lab.demo import _vllm_script as script
from kvobs.store import StoreReader
from tests.vllm_engine import VARIABLE, interpreters

pytestmark = [pytest.mark.torch, pytest.mark.slow]

# As long as SmolLM2's own beginning, so that the pool is as short of blocks as in the demo.
PREAMBLE = " ".join(["you", "are", "a", "helpful", "assistant", "named", "nobody", "at", "all"] * 3)
TEMPLATE = (f"<|im_start|> {PREAMBLE} <|im_end|> {{% for m in messages %}}<|im_start|> {{{{ m['role'] }}}} "
            "{{ m['content'] }} <|im_end|> {% endfor %}"
            "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")
Line = dict[str, Any]


def make_tiny(directory: Path) -> Path:
    """A random Llama that vLLM's CPU back end runs, and a tokenizer of the script's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    said = " ".join([PREAMBLE, "user assistant", *(line for lines in script.DIALOGUES.values() for line in lines)])
    vocabulary = {word: number for number, word in enumerate(
        [*special, *sorted(set(re.findall(r"\w+|[^\w\s]+", said)))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>",
                                   pad_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        pad_token_id=2)).save_pretrained(directory)
    return directory


def environment() -> Path:
    """An environment with vLLM, or a skip."""
    places = [Path(python).parent.parent for python in interpreters()] or [_vllm_env.default_directory()]
    if not _vllm_env.look(places[0]).ready:
        pytest.skip(f"{VARIABLE} names no Python with vLLM, and {places[0]} has none (kvobs demo --engine vllm "
                    "makes it).")
    return places[0]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Line], Path, str]:
    """The JSON lines of one run, its store, and what was said on stderr."""
    place, base = environment(), tmp_path_factory.mktemp("vllm")
    model = make_tiny(base / "tiny-chat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVOBS_STORE", str(base / "store"))
        patch.setenv("KVOBS_PROMETHEUS", "127.0.0.1:0")
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = run_vllm(directory=place, as_json=True, model=model)
    assert code == 0, err.getvalue()
    return [json.loads(line) for line in out.getvalue().splitlines()], base / "store", err.getvalue()


@pytest.fixture
def figures(demo: tuple[list[Line], Path, str]) -> dict[str, Line]:
    return {line["figure"]: line for line in demo[0] if line["kind"] == "figure"}


@pytest.fixture
def turns(demo: tuple[list[Line], Path, str]) -> list[Line]:
    return [line for line in demo[0] if line["kind"] == "turn"]


def test_both_turns_are_under_pressure(figures: dict[str, Line]) -> None:
    """In each turn requests are preempted, cached blocks are evicted and allocations fail."""
    for name in ("Preemptions", "Evicted blocks", "Failed allocations"):
        assert min(figures[name]["kvobs"]) > 0
        assert len(figures[name]["kvobs"]) == script.TURNS


def test_every_session_has_its_turns(turns: list[Line]) -> None:
    """Eight sessions, two turns each, every reply as long as asked, blocks as many as its tokens need."""
    assert [(turn["session"], turn["turn"]) for turn in turns] == [
        (name, number) for name in script.DIALOGUES for number in (1, 2)]
    for turn in turns:
        assert turn["new_tokens"] == script.NEW_TOKENS
        held = turn["prompt_tokens"] + script.NEW_TOKENS - 1  # the last token is never fed back
        assert turn["blocks"] == -(-held // script.BLOCK_TOKENS)
        assert turn["cached_tokens"] % script.BLOCK_TOKENS == 0
        assert 0 < turn["ttft_s"] < 600


def test_sums_over_sessions_are_the_pool_s_counts(figures: dict[str, Line], turns: list[Line]) -> None:
    """Preemptions, tokens computed twice and prefix hits of all requests add up to what the pool and vLLM counted."""
    for number in (1, 2):
        own = [turn for turn in turns if turn["turn"] == number]
        preempted = sum(turn["preemptions"] for turn in own)
        assert figures["Preemptions"]["kvobs"][number - 1] == preempted
        assert figures["Tokens computed twice"]["kvobs"]["preempted"][number - 1] == sum(
            turn["recomputed_tokens"] for turn in own)
        prefix = figures["Prompt tokens found in the prefix cache"]
        for name, field in (("hit", "cached_tokens"), ("queried", "prompt_tokens")):
            total = sum(turn[field] for turn in own)
            assert prefix["kvobs"][f"first_{name}"][number - 1] == total
            assert prefix["vllm"][name][number - 1] == total
    # Both turns end with an idle engine, so vLLM has counted by then whatever it counts late.
    assert figures["Preemptions"]["vllm"] == figures["Preemptions"]["kvobs"]


def test_the_pool_adds_up(figures: dict[str, Line]) -> None:
    """Between the turns no request holds a block, the states add up to the pool, and vLLM calls all of it free."""
    states = figures["The pool after the first turns"]["kvobs"]
    for number in range(script.TURNS):
        assert sum(values[number] for values in states.values()) == script.POOL_BLOCKS
        assert states["used"][number] == 0
        assert states["cached"][number] > 0
    assert figures["The pool after the first turns"]["vllm"] == [0.0] * script.TURNS
    evicted = figures["Evicted blocks"]
    assert all(said >= happened for said, happened in zip(evicted["vllm"], evicted["kvobs"], strict=True))


def test_the_store_has_the_run(demo: tuple[list[Line], Path, str]) -> None:
    """The store in the user's directory holds sixteen turns of one process that has ended, and stdout had only JSON."""
    lines, store, said = demo
    reader = StoreReader(store)
    (process,) = reader.processes()
    assert not process.alive
    assert {stored.record.session for stored in reader.turns()} == set(script.DIALOGUES)
    assert len(list(reader.turns())) == 2 * len(script.DIALOGUES)
    assert {line["kind"] for line in lines} == {"figure", "turn"}
    assert "Turn 2 of 2" in said
