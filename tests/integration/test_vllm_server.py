"""A real vLLM server under load: what the client saw, what vLLM says and what kvobs tells are one truth."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("opentelemetry.proto", reason="The OTLP exporters are not installed (extra otel).")
from kvobs.model import Turn
from kvobs.store import Process, StoreReader, phases, pools, preemptions
from tests.peers import http_get
from tests.support import wait_until
from tests.vllm_server import BLOCKS, LENGTH, Span, answers, interpreter, make_model, receiving, serving, values

pytestmark = [pytest.mark.slow, pytest.mark.peer]
TEXT = "The quick brown fox jumps over the lazy dog. "
# 8 run at once in a pool for about 3 of them: they are preempted. Prompts begin alike: prefixes are found.
PLAN: list[dict[str, Any]] = [
    *({"number": n, "prompt": TEXT * 2 + str(n), "max_tokens": 150, "stream": True} for n in range(1, 9)),
    *({"number": n, "prompt": TEXT * 2 + str(n), "max_tokens": 400, "stream": True, "abort": 9} for n in range(9, 12)),
    *({"number": n, "prompt": TEXT + str(n), "max_tokens": 40, "n": 2} for n in range(12, 15)),
    {"number": 15, "prompt": TEXT, "max_tokens": 20, "chat": True,
     "baggage": "session.id=alice,session.priority=critical"},
    {"number": 16, "prompt": TEXT, "max_tokens": 20, "chat": True, "stream": True, "baggage": "session.id=alice"},
]
LAST = [{"number": n, "prompt": f"{n} " * 20, "max_tokens": 400, "stream": True} for n in range(101, 107)]


class Recorded(NamedTuple):
    """What was left of a server's life."""

    seen: dict[int, dict[str, Any]]
    cut: dict[int, dict[str, Any]]
    vllm_says: str
    reported: str
    document: dict[str, Any]
    reader: StoreReader
    spans: list[Span]
    code: int

    def turns(self) -> dict[int, list[Turn]]:
        """Turns by the number of the request whose trace they are of."""
        found: dict[int, list[Turn]] = {}
        for stored in self.reader.turns():
            found.setdefault(int(stored.record.trace_id, 16), []).append(stored.record)
        return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """One server: a load of all kinds, then SIGTERM while requests run."""
    interpreter()
    here = tmp_path_factory.mktemp("vllm")
    store = here / "store"
    with receiving() as (address, spans):
        settings = {"KVOBS_STORE": str(store), "KVOBS_PROMETHEUS": "127.0.0.1:0", "VLLM_PLUGINS": "kvobs",
                    "OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        with serving(make_model(here), here, settings=settings) as server:
            seen = server.asked(PLAN)
            wait_until(lambda: server.running() == 0, what="vLLM says that nothing runs")
            document: dict[str, Any] = {}

            def settled() -> bool:
                document.update(json.loads(http_get(f"{server.url}/kvobs")[2]))
                roles = {process["role"] for process in document["processes"]}
                return {"api_server", "engine_core", "worker"} <= roles and [
                    states["counts"] for states in document["requests"]] == [[]]

            wait_until(settled, what="GET /kvobs knows all processes and no request")
            says = http_get(f"{server.url}/metrics")[2].decode()
            front, = (process["endpoint"] for process in document["processes"] if process["role"] == "api_server")
            reported = {"text": ""}

            def told() -> bool:
                reported["text"] = http_get(front)[2].decode()
                return total(reported["text"], "kvobs_engine_finished_total") == total(
                    says, "vllm:request_success_total")

            wait_until(told, what="kvobs has what vLLM last said")
            client = server.asks(LAST)
            wait_until(lambda: server.running() > 0, what="requests run")
            code = server.terminate()
            cut = answers(client)
        yield Recorded({one["number"]: one for one in seen}, {one["number"]: one for one in cut}, says,
                       reported["text"], document, StoreReader(store), spans, code)


def total(exposition: str, name: str) -> float:
    return sum(values(exposition, name).values())


def test_every_request_is_one_turn_per_choice_of_its_own_trace(recorded: Recorded) -> None:
    """Each request's turns have the trace that the client gave it, as many as choices were asked for."""
    counts = {number: len(turns) for number, turns in recorded.turns().items()}
    expected = {request["number"]: request.get("n", 1) for request in PLAN}
    assert {number: count for number, count in counts.items() if number in expected} == expected


def test_tokens_are_those_that_the_client_counted(recorded: Recorded) -> None:
    """Prompt and new tokens of every request that was not aborted equal the usage that OpenAI's library was told."""
    turns = recorded.turns()
    for number, seen in recorded.seen.items():
        if seen["completion"] is None:
            continue
        assert sum(turn.new_tokens for turn in turns[number]) == seen["completion"], number
        assert {turn.prompt_tokens for turn in turns[number]} == {seen["prompt"]}
        assert {turn.outcome for turn in turns[number]} == {"ok"}
    assert sum(seen["completion"] is None for seen in recorded.seen.values()) == 3


def test_aborted_requests_are_told_as_such(recorded: Recorded) -> None:
    """A client that hangs up after 9 chunks has made at least so many tokens, and its turn is cancelled or was over."""
    for number in (request["number"] for request in PLAN if "abort" in request):
        turn, = recorded.turns()[number]
        assert recorded.seen[number]["chunks"] <= turn.new_tokens <= 400
        over = turn.new_tokens == 400 or turn.prompt_tokens + turn.new_tokens >= LENGTH
        assert turn.outcome == ("ok" if over else "cancelled")


def test_a_session_is_what_the_baggage_says(recorded: Recorded) -> None:
    """Two requests of one session are its first and second turn, in its priority."""
    turns = recorded.turns()
    (first,), (second,) = turns[15], turns[16]
    assert {first.session, second.session} == {"alice"}
    assert {first.priority, second.priority} == {"critical", "normal"}
    assert {first.turn, second.turn} == {1, 2}


def test_what_vllm_says_is_reported_as_it_says_it(recorded: Recorded) -> None:
    """The ``kvobs.engine.*`` counters of the API server equal those of vLLM's own metrics page."""
    for theirs, ours in (("vllm:prompt_tokens_total", 'kind="prompt"'),
                         ("vllm:generation_tokens_total", 'kind="generation"')):
        assert total(recorded.vllm_says, theirs) == sum(
            value for labels, value in values(recorded.reported, "kvobs_engine_tokens_total").items() if ours in labels)
    for theirs, name in (("vllm:num_preemptions_total", "kvobs_engine_preemptions_total"),
                         ("vllm:prefix_cache_queries_total", "kvobs_engine_prefix_queried_total"),
                         ("vllm:prefix_cache_hits_total", "kvobs_engine_prefix_hit_total"),
                         ("vllm:kv_cache_usage_perc", "kvobs_engine_kv_utilization_ratio")):
        assert total(recorded.vllm_says, theirs) == total(recorded.reported, name), name
    assert total(recorded.reported, "kvobs_engine_kv_blocks") == BLOCKS


def test_there_was_pressure_and_each_preemption_is_told(recorded: Recorded) -> None:
    """As many preemptions have a victim, a cause and lost tokens as the pool counted; there were some."""
    told = [stored.record for stored in preemptions(recorded.reader)]
    blocks = [stored.record for stored in recorded.reader.blocks()]
    assert len(told) == max(state.preemptions for state in blocks) > 0
    assert {one.cause for one in told} == {"blocks"}
    assert all(one.tokens_lost > 0 and one.blocks > 0 for one in told)
    ended = Counter(stored.record.phase for stored in phases(recorded.reader))
    assert ended["preempted"] == len(told)


def test_the_states_of_blocks_are_the_pool(recorded: Recorded) -> None:
    """Used, cached, free and pinned blocks add up to the pool in every second, and nothing is unexplained."""
    pinned = {(stored.process, stored.wall_ns): stored.record for stored in pools(recorded.reader)}
    assert pinned
    for stored in recorded.reader.blocks():
        work, state = pinned[stored.process, stored.wall_ns], stored.record
        if work.t_ns == state.t_ns:
            assert state.used + state.cached + state.free + work.pinned == BLOCKS
        assert work.unexplained == 0


def test_each_process_is_what_it_is(recorded: Recorded) -> None:
    """``GET /kvobs`` names the live processes of the server with their roles, ranks and endpoints; no token ids."""
    found = {process["role"]: process for process in recorded.document["processes"]}
    assert {role: process["ranks"] for role, process in found.items()} == {
        "api_server": "", "engine_core": "dp=0", "worker": "dp=0 tp=0 pp=0"}
    assert len({process["endpoint"] for process in found.values()}) == 3
    assert TEXT[:10] not in json.dumps(recorded.document)


def test_one_request_is_one_trace(recorded: Recorded) -> None:
    """Every request has one span per choice in the client's trace, whose children are its phases."""
    for request in PLAN:
        of_trace = [span for span in recorded.spans if int(span.trace, 16) == request["number"]]
        roots = [span for span in of_trace if span.parent == f"{request['number']:016x}"]
        assert len(roots) == request.get("n", 1), request
        for root in roots:
            children = [span for span in of_trace if span.parent == root.id]
            assert {"queued", "prefill", "decode"} <= {span.name for span in children}
            assert all(root.start_ns <= span.start_ns <= span.end_ns <= root.end_ns for span in children)
        assert len(of_trace) == len(roots) + sum(span.parent in {root.id for root in roots} for span in of_trace)


def test_nothing_is_lost_on_sigterm(recorded: Recorded) -> None:
    """Requests that ran when the server was asked to end are told as cancelled, with all the tokens that were seen."""
    assert recorded.code == 0
    turns = recorded.turns()
    for number, seen in recorded.cut.items():
        if number not in turns:
            assert seen["chunks"] == 0  # it was refused, or had not reached the engine
            continue
        turn, = turns[number]
        assert turn.outcome == "cancelled"
        assert turn.new_tokens >= seen["chunks"] - 1  # the last chunk says only why it ends
    assert any(number in turns for number in recorded.cut)
    processes: list[Process] = recorded.reader.processes()
    assert len(processes) == 3
    assert not any(process.alive or process.dropped for process in processes)
