"""A real vLLM server, in the first environment that ``KVOBS_TEST_VLLM`` names, with a tiny random model on the CPU."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.peers import http_get
from tests.support import ROOT, child_environment, free_port, run_child, wait_until
from tests.vllm_engine import WHY_NOT, interpreters

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
    """The first Python of an environment with vLLM and kvobs, or a skip."""
    found = interpreters()
    if not found:
        pytest.skip(WHY_NOT)
    return found[0]


def make_model(directory: Path) -> Path:
    """A directory that vLLM loads as a model."""
    done = run_child([interpreter(), "-c", MAKE_MODEL, directory], cwd=directory)
    assert done.returncode == 0, done.stderr
    return directory


class Span(NamedTuple):
    """A span that was received; ids are hex, times Unix nanoseconds, events are names."""

    trace: str
    id: str
    parent: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]


@contextlib.contextmanager
def receiving() -> Iterator[tuple[str, list[Span]]]:
    """A receiver of traces over OTLP/HTTP: its address, and the spans that came so far."""
    found: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                sent = ExportTraceServiceRequest.FromString(body)
                found.extend(_span(span) for resource in sent.resource_spans for scope in resource.scope_spans
                             for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="otlp-receiver", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", found
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def _span(span: Any) -> Span:
    attributes = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes
                  if one.value.WhichOneof("value") not in (None, "array_value")}
    return Span(span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name,
                span.start_time_unix_nano, span.end_time_unix_nano, attributes,
                tuple(event.name for event in span.events))


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

    def asks(self, plan: list[dict[str, Any]]) -> subprocess.Popen[str]:
        """A client at work (see ``tests.vllm_client``)."""
        return subprocess.Popen([interpreter(), "-m", "tests.vllm_client", self.url, json.dumps(plan)], cwd=ROOT,
                                env=child_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def asked(self, plan: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a client saw of all requests of a plan."""
        return answers(self.asks(plan))

    def running(self) -> float:
        """How many requests run, as vLLM says."""
        return sum(values(http_get(f"{self.url}/metrics")[2].decode(), "vllm:num_requests_running").values())

    def terminate(self) -> int:
        """Ask it to end as an orchestrator does; returns its exit code."""
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(timeout=60)

    def kill_everything(self) -> None:
        """End all of its processes at once (they are of one process group)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(timeout=60)


def answers(client: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What a client saw, once it has ended."""
    out, _ = client.communicate(timeout=300)
    assert client.returncode == 0
    found: list[dict[str, Any]] = json.loads(out)
    return found


def values(exposition: str, name: str) -> dict[str, float]:
    """The samples of a metric by their labels, as text."""
    found = {}
    for line in exposition.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name:
            found[sample.removeprefix(name)] = float(value)
    return found


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
        wait_until(server.healthy, timeout=400, what="vLLM serves")
        yield server
    finally:
        server.kill_everything()
