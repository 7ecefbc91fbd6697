"""Three ways to observe one script see the same, and what they see follows from arithmetic."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest

from tests.support import child_environment, run_child

pytest.importorskip("transformers", reason="transformers is not installed.")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

LAYERS, PROMPT, NEW = 2, 5, 7
# DynamicCache on K and V of float32: heads x head dimension x 4 bytes, in every layer.
BYTES_PER_TOKEN = 2 * LAYERS * 2 * 8 * 4
SCRIPT = f"""
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers={LAYERS},
                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
model = LlamaForCausalLM(config).eval()
prompt = torch.arange(1, {PROMPT + 1})[None]
first = model.generate(prompt, max_new_tokens={NEW}, min_new_tokens={NEW}, do_sample=False, pad_token_id=0)
print(model.generate(first, max_new_tokens={NEW}, min_new_tokens={NEW}, do_sample=False, pad_token_id=0).tolist())
"""
_COLUMNS = ("prompt_tokens", "new_tokens", "steps", "reallocations", "bytes_written", "bytes_copied", "kv_bytes")
_BIN = Path(sys.executable).parent
_WAYS = {
    "run": [sys.executable, "-m", "kvobs", "run", "--"],
    "opentelemetry": [str(_BIN / "opentelemetry-instrument")],
    "run of opentelemetry": [sys.executable, "-m", "kvobs", "run", "--", str(_BIN / "opentelemetry-instrument")],
    "opentelemetry of run": [str(_BIN / "opentelemetry-instrument"), sys.executable, "-m", "kvobs", "run", "--"],
}


def _expected(prompt: int) -> tuple[int, ...]:
    # The first pass writes the prompt, each later one a token; concatenation replaces K and V of every layer each
    # time and copies what was there. The last token is not fed back.
    copied = sum(range(prompt, prompt + NEW - 1)) * BYTES_PER_TOKEN
    held = (prompt + NEW - 1) * BYTES_PER_TOKEN
    return prompt, NEW, NEW, 2 * LAYERS * NEW, held, copied, held


def _turns(store: Path) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for path in sorted(store.glob("*.sqlite")):
        database = sqlite3.connect(path)
        found += database.execute(f"SELECT {', '.join(_COLUMNS)} FROM turns ORDER BY start_ns").fetchall()
        database.close()
    return found


@pytest.mark.parametrize("way", _WAYS)
def test_every_way_counts_the_same_once(way: str, tmp_path: Path) -> None:
    """Each way stores both turns once, with reallocations = 2 x layers x passes and the bytes of the series."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_child([*_WAYS[way], sys.executable, script], cwd=tmp_path, env=child_environment(
        KVOBS_PROMETHEUS="off", KVOBS_STORE=str(tmp_path / "store")))
    assert done.returncode == 0, done.stderr
    assert _turns(tmp_path / "store") == [_expected(PROMPT), _expected(PROMPT + NEW)]


def test_the_tokens_do_not_change(tmp_path: Path) -> None:
    """Observed and alone, the script prints the same tokens."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = child_environment(KVOBS_PROMETHEUS="off", KVOBS_STORE="off")
    alone = run_child([sys.executable, script], cwd=tmp_path, env=settings)
    ours = run_child([*_WAYS["run"], sys.executable, script], cwd=tmp_path, env=settings)
    assert (ours.returncode, ours.stdout) == (alone.returncode, alone.stdout) == (0, alone.stdout)
