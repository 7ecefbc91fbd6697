"""A real vLLM server, in the environment that ``KVOBS_TEST_VLLM`` names, with a tiny random model on the CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.peers import http_get
from tests.support import child_environment, free_port, run_child, wait_until

VARIABLE = "KVOBS_TEST_VLLM"
BLOCK, BLOCKS, LENGTH, SEQUENCES = 32, 24, 512, 8  # tokens, blocks, tokens, requests at once

# A tokenizer of single bytes: the tokens of an ASCII prompt are its characters. The weights are vLLM's dummy ones.
MAKE_MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
words = {letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}
bare = Tokenizer(models.BPE(words, []))
bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bare.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>")
tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
tokenizer.save_pretrained(sys.argv[1])
config = LlamaConfig(vocab_size=320, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
                     torch_dtype="bfloat16")
config.architectures = ["LlamaForCausalLM"]
config.save_pretrained(sys.argv[1])
"""


def interpreter() -> str:
    """The Python of an environment with vLLM and kvobs, or a skip."""
    found = os.environ.get(VARIABLE)
    if not found:
        pytest.skip(f"{VARIABLE} names no Python of an environment with vLLM and kvobs.")
    return found


def make_model(directory: Path) -> Path:
    """A directory that vLLM loads as a model."""
    done = run_child([interpreter(), "-c", MAKE_MODEL, directory], cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


class Server:
    """A running server. ``port`` is its HTTP port, ``child`` its first process, ``log`` what it prints."""

    def __init__(self, child: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.child = child
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def healthy(self) -> bool:
        """Whether it answers; fails the test when its process has ended."""
        assert self.child.poll() is None, self.text()[-4000:]
        try:
            return http_get(f"{self.url}/health")[0] == 200
        except OSError:
            return False

    def terminate(self) -> int:
        """Ask it to end as an orchestrator does; returns its exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(timeout=60)

    def kill_everything(self) -> None:
        """End all of its processes at once (they are of one process group)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(timeout=60)


@contextlib.contextmanager
def serving(model: Path, directory: Path, *options: str, settings: Mapping[str, str]) -> Iterator[Server]:
    """A server of ``model`` whose pool has ``BLOCKS`` blocks, with its log in ``directory``."""
    port, log = free_port(), directory / "vllm.log"
    command = [interpreter(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name",
               "tiny", "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--dtype", "bfloat16",
               "--enforce-eager", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS),
               "--max-model-len", str(LENGTH), "--max-num-seqs", str(SEQUENCES), "--kv-cache-memory-bytes",
               str(64 * 1024**2), *options]
    environment = child_environment(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", **settings)
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                 env=environment, cwd=directory, start_new_session=True)
    server = Server(child, port, log)
    try:
        wait_until(server.healthy, timeout=180, what="vLLM serves")
        yield server
    finally:
        server.kill_everything()
