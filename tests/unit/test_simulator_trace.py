"""Readers of serving traces, load shapes, and the constants of the modelled server."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest

from kvobs.breaker.simulator import CONSTANTS, SHAPES, Request, Server, TraceError, read_trace, scenario, server_with
from kvobs.breaker.simulator._trace import scaled

SECOND = 10**9
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "serving"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,374,44\n"
MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": %s, "hash_ids": %s}\n'


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_an_azure_trace_is_read_to_the_nanosecond(tmp_path: Path) -> None:
    """Times become nanoseconds since the first request, in order; an output of 0 tokens counts as 1."""
    path = written(tmp_path / "t.csv", AZURE + ROW + "2023-11-16 18:15:45.6805899,91,0\r\n\n")
    assert read_trace(path).requests == (Request(0, 91, 1), Request(1_000_000_100, 374, 44))


def test_a_mooncake_trace_keeps_whole_distinct_chunks(tmp_path: Path) -> None:
    """Only whole chunks of 512 tokens are shared, up to the first that repeats; milliseconds become nanoseconds."""
    path = written(tmp_path / "t.jsonl", MOONCAKE % (27, 1_100, 3, [5, 6, 7])
                   + MOONCAKE % (30.5, 2_048, 1, [5, 6, 5, 8]) + "\n")
    assert read_trace(path).requests == (Request(0, 1_100, 3, (5, 6)), Request(3_500_000, 2_048, 1, (5, 6)))


def test_rate_and_limit_scale_a_trace(tmp_path: Path) -> None:
    """The first requests are taken, and arrive so many times as fast."""
    path = written(tmp_path / "t.jsonl", "".join(MOONCAKE % (1_000 * at, 16, 1, []) for at in range(5)))
    assert [one.arrival_ns for one in read_trace(path, rate=4, limit=3).requests] == [0, SECOND // 4, SECOND // 2]


@pytest.mark.parametrize(("text", "says"), [
    ("", "begins with neither"),
    ("a,b,c\n1,2,3\n", "begins with neither"),
    (AZURE, "has no requests"),
    (AZURE + ROW + "2023-11-16 18:15:47,1\n", "In line 3 of"),
    (AZURE + "2023-02-30 18:15:47,1,1\n", "the time is '2023-02-30 18:15:47'"),
    (AZURE + "yesterday,1,1\n", "the time is 'yesterday'"),
    (AZURE + "2023-11-16 18:15:47,-1,1\n", "ContextTokens is '-1'; allowed are 1 to"),
    (AZURE + "2023-11-16 18:15:47,0,1\n", "ContextTokens is '0'"),
    (AZURE + "2023-11-16 18:15:47,1,1e3\n", "GeneratedTokens is '1e3'"),
    (AZURE + "2023-11-16 18:15:47,1,99999999999999\n", "GeneratedTokens is"),
    (AZURE + '"2023', "the number of fields is 1; allowed are 3"),
    (AZURE.encode() + b"\xff\xfe", "is not text in UTF-8"),
    ('{"timestamp": 1', "In line 1 of"),
    ('{"timestamp": 1, "input_length": 2}', "output_length"),
    (MOONCAKE % (-1, 2, 3, []), "timestamp is -1.0; allowed are 0 to 1e13 ms"),
    (MOONCAKE % (1, "2.5", 3, []), "In line 1 of"),
    (MOONCAKE % (1, 512, 3, [1, 2]), "the number of hash_ids is 2 for 512 tokens"),
    (MOONCAKE % (1, 2, 3, []) + MOONCAKE % (1e12, 2, 3, []), "more than 31 days; --rate"),
])
def test_a_bad_trace_is_refused_in_one_sentence(tmp_path: Path, text: str | bytes, says: str) -> None:
    """What is wrong, in which line, and what is allowed is one sentence."""
    with pytest.raises(TraceError) as refused:
        read_trace(written(tmp_path / "bad", text))
    assert says in str(refused.value)
    assert str(refused.value).endswith(".")
    assert "\n" not in str(refused.value)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A missing file and a directory are one sentence."""
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(path)


def test_the_public_traces_are_read_whole() -> None:
    """Azure's and Mooncake's files give the sums that the csv and json modules give."""
    azure, mooncake = SHARED / "AzureLLMInferenceTrace_conv.csv", SHARED / "mooncake_conversation_trace.jsonl"
    if not azure.is_file():
        pytest.skip(f"{azure.name} of the shared data is not here.")
    with azure.open() as file:
        rows = list(csv.DictReader(file))
    found = read_trace(azure).requests
    assert len(found) == 19_366 == len(rows)
    assert sum(one.prompt for one in found) == sum(int(row["ContextTokens"]) for row in rows)
    assert sum(one.output for one in found) == sum(max(int(row["GeneratedTokens"]), 1) for row in rows)
    lines = [json.loads(line) for line in mooncake.read_text().splitlines()]
    found = read_trace(mooncake).requests
    assert len(found) == 12_031
    assert sum(one.prompt for one in found) == sum(line["input_length"] for line in lines)
    assert sum(len(one.chunks) for one in found) == sum(line["input_length"] // 512 for line in lines)


@pytest.mark.parametrize("name", SHAPES)
def test_a_scenario_is_its_seed(name: str) -> None:
    """The same seed gives the same requests, another seed others, in the order of arrival."""
    load = scenario(name, seed=3)
    assert load == scenario(name, seed=3)
    assert load.requests != scenario(name, seed=4).requests
    times = [one.arrival_ns for one in load.requests]
    assert times == sorted(times)
    assert times[0] == 0


def test_a_conversation_shares_its_prefix() -> None:
    """Turns of one conversation begin with all whole chunks of the turn before; conversations share none."""
    conversations: dict[int, list[Request]] = {}
    for one in scenario("steady").requests:
        if one.chunks:
            conversations.setdefault(one.chunks[0], []).append(one)
    assert any(len(turns) > 3 for turns in conversations.values())
    for turns in conversations.values():
        for earlier, later in itertools.pairwise(turns):
            assert later.chunks[:len(earlier.chunks)] == earlier.chunks
            assert later.prompt >= earlier.prompt + earlier.output
    chunks = [chunk for turns in conversations.values() for chunk in turns[-1].chunks]
    assert len(chunks) == len(set(chunks))


def test_a_steady_load_is_a_poisson_process_of_its_rate() -> None:
    """Over 40 seeds, conversations of 600 s at one per second are 600 on average, within 5 standard errors."""
    counts = [len({one.chunks[0] if one.chunks else one for one in scenario("steady", seed=seed).requests})
              for seed in range(40)]
    assert abs(sum(counts) / 40 - 600) < 5 * (600 / 40) ** 0.5


def test_an_unknown_scenario_is_refused() -> None:
    """The sentence names those that there are."""
    with pytest.raises(ValueError, match="allowed are steady, rising, burst, idle"):
        scenario("stormy")


def test_scaling_keeps_everything_but_time() -> None:
    """Twice the rate halves the distances and changes nothing else."""
    made = scaled([Request(5_000, 2, 3, (1,)), Request(1_000, 4, 5)], 2.0)
    assert made == (Request(0, 4, 5), Request(2_000, 2, 3, (1,)))


def test_constants_follow_from_their_sources() -> None:
    """The defaults are what the data sheet and the model's shape give."""
    server = Server()
    weights, bandwidth, kv = 2 * 8.03e9, 864e9, 2 * 32 * 8 * 128 * 2
    assert server.step_s == pytest.approx(weights / bandwidth, rel=0.001)
    assert server.context_s == pytest.approx(kv / bandwidth, rel=0.001)
    assert server.token_s == pytest.approx(2 * 8.03e9 / (362e12 * 0.5), rel=0.001)
    assert server.blocks == int((0.9 * 48e9 - weights - 2e9) / (16 * kv))
    assert server.host_blocks == (32 << 30) // (16 * kv)
    assert server.host_s == pytest.approx(16 * kv / 25e9, rel=0.01)
    assert {one.name for one in CONSTANTS} == set(Server.__struct_fields__)


def test_constants_are_changed_by_name() -> None:
    """Each NAME=VALUE changes one of them; a whole number stays one."""
    server = server_with(["blocks = 20", "step_s=0.5"])
    assert (server.blocks, server.step_s, server.slots) == (20, 0.5, 256)


@pytest.mark.parametrize(("change", "says"), [
    ("blocks", "not of the form NAME=VALUE"), ("block=3", "did you mean 'blocks'?"),
    ("blocks=0", "a whole number from"), ("blocks=2.5", "a whole number"),
    ("step_s=nan", "a number from 0 to 100"), ("step_s=1e999", "a number"),
    ("sheddable=0.95", "more than 1 together")])
def test_a_bad_constant_is_refused(change: str, says: str) -> None:
    """What is wrong and what is allowed is one sentence."""
    with pytest.raises(ValueError, match=r"[.?]$") as refused:
        server_with([change])
    assert says in str(refused.value)
