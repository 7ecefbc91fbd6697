"""What the built-in table makes of real and of hand-written pages of each engine, beside arithmetic on their lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvobs.bridge import Translator, built_in
from kvobs.bridge._exposition import parse
from kvobs.bridge._mapping import Mapped
from tests.support import ROOT

PRESSURE = ROOT.parent / "shared" / "data" / "serving" / "vllm_0.32_metrics_under_pressure.txt"
LOAD = Path(__file__).parents[1] / "data" / "serving" / "vllm_0.29_metrics_under_load.txt"


def means(page: str) -> Mapped:
    translator = Translator(built_in())
    return translator.translate(parse([page.encode()], translator.knows).samples, "t:1")


def point(found: Mapped, name: str, *own: str, model: str, ranks: str = "", engine: str = "vllm") -> float | None:
    """One reading, or None where there is none."""
    values = [value for row, attributes, value in found.readings
              if row == "kvobs.engine." + name and attributes == (engine, "t:1", model, ranks, *own)]
    assert len(values) <= 1
    return values[0] if values else None


def said(page: str, name: str, **labels: str) -> float:
    """What a line of the page says, found by a regular expression of the test's own."""
    wanted = [line for line in page.splitlines() if re.match(re.escape(name) + r"[{ ]", line)
              and all(f'{key}="{value}"' in line for key, value in labels.items())]
    assert len(wanted) == 1, (name, labels, wanted)
    return float(wanted[0].rsplit(" ", 1)[1])


VLLM = {
    ("kv.utilization", "device"): ("vllm:kv_cache_usage_perc", {}),
    ("requests", "running"): ("vllm:num_requests_running", {}),
    ("requests", "waiting"): ("vllm:num_requests_waiting", {}),
    ("waiting", "capacity"): ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}),
    ("waiting", "deferred"): ("vllm:num_requests_waiting_by_reason", {"reason": "deferred"}),
    ("preemptions",): ("vllm:num_preemptions_total", {}),
    ("tokens", "prompt"): ("vllm:prompt_tokens_total", {}),
    ("tokens", "generation"): ("vllm:generation_tokens_total", {}),
    ("prefix.queried", "device"): ("vllm:prefix_cache_queries_total", {}),
    ("prefix.hit", "device"): ("vllm:prefix_cache_hits_total", {}),
    ("prefix.queried", "external"): ("vllm:external_prefix_cache_queries_total", {}),
    ("finished", "length"): ("vllm:request_success_total", {"finished_reason": "length"}),
    ("finished", "abort"): ("vllm:request_success_total", {"finished_reason": "abort"}),
    ("kv.residency.blocks", "lifetime"): ("vllm:kv_block_lifetime_seconds_count", {}),
    ("kv.residency.duration", "lifetime"): ("vllm:kv_block_lifetime_seconds_sum", {}),
    ("kv.residency.duration", "idle"): ("vllm:kv_block_idle_before_evict_seconds_sum", {}),
    ("kv.residency.blocks", "reuse_gap"): ("vllm:kv_block_reuse_gap_seconds_count", {}),
    ("phase.duration", "request"): ("vllm:e2e_request_latency_seconds_sum", {}),
    ("phase.duration", "queue"): ("vllm:request_queue_time_seconds_sum", {}),
    ("phase.duration", "prefill"): ("vllm:request_prefill_time_seconds_sum", {}),
    ("phase.duration", "decode"): ("vllm:request_decode_time_seconds_sum", {}),
    ("phase.duration", "first_token"): ("vllm:time_to_first_token_seconds_sum", {}),
    ("phase.observations", "inter_token"): ("vllm:inter_token_latency_seconds_count", {}),
}


@pytest.fixture(scope="module", params=["0.29", "0.32"])
def real(request: pytest.FixtureRequest) -> tuple[str, str, Mapped]:
    """A real page, its model, and what it means."""
    path = {"0.29": LOAD, "0.32": PRESSURE}[request.param]
    if not path.exists():
        pytest.skip(f"The recorded page {path.name} is not on this machine.")
    page = path.read_text()
    return page, {"0.29": "tiny-llama", "0.32": "smollm2"}[request.param], means(page)


@pytest.mark.parametrize("key", VLLM, ids=".".join)
def test_a_real_page_means_what_its_lines_say(real: tuple[str, str, Mapped], key: tuple[str, ...]) -> None:
    """Each point of a real server's page has the very number of its line, under the page's model and rank."""
    page, model, found = real
    name, labels = VLLM[key]
    assert point(found, *key, model=model, ranks="dp=0") == said(page, name, **labels)


def test_a_real_page_is_told_completely_and_once(real: tuple[str, str, Mapped]) -> None:
    """No point comes twice, nothing was dropped, and every point of a real page has a value of its line."""
    page, _, found = real
    assert len({(name, attributes) for name, attributes, _ in found.readings}) == len(found.readings)
    assert found.dropped == {}
    numbers = {float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if not line.startswith("#")}
    numbers |= {float(text) for text in re.findall(r'(?:num_gpu_blocks|kv_cache_size_tokens)="(\d+)"', page)}
    assert {value for _, _, value in found.readings} <= numbers


def test_the_recorded_load_adds_up() -> None:
    """In the page recorded under load: 20 of 23 blocks used, waiting requests by reason, tokens per request."""
    found = means(LOAD.read_text())
    blocks = point(found, "kv.blocks", "device", model="tiny-llama", ranks="dp=0")
    assert (blocks, point(found, "kv.capacity", "device", model="tiny-llama", ranks="dp=0")) == (24.0, 24 * 32)
    assert point(found, "kv.utilization", "device", model="tiny-llama", ranks="dp=0") == 20 / (24 - 1)
    known = {"model": "tiny-llama", "ranks": "dp=0"}
    waiting = [point(found, "waiting", reason, **known) for reason in ("capacity", "deferred")]
    assert waiting == [7.0, 0.0]
    assert point(found, "requests", "waiting", **known) == 7.0
    # 14 requests: 4 ended (of 160 tokens each), 3 run, 7 wait; 10 have begun, each with a prompt of 95 tokens.
    assert point(found, "finished", "length", **known) == 14 - 3 - 7
    assert point(found, "prefix.queried", "device", **known) == 10 * 95
    assert point(found, "rejected", "max_num_queued_reqs", **known) is None


def test_what_a_vllm_page_names_once_holds_for_all_of_it() -> None:
    """A sample without model or rank is of the page's only one; of a page with two of them it stays without."""
    share = 'vllm:kv_cache_usage_perc{{engine="{}",model_name="{}"}} 0.5\n'
    bare = ('vllm:cache_config_info{engine="0",num_gpu_blocks="24"} 1\n'
            'vllm:admission_rejections_total{model_name="m",reason="full"} 3\n')
    for others, model, ranks in (
            ("", "m", "dp=0"), (share.format(1, "m"), "m", ""), (share.format(0, "n"), "", "dp=0")):
        found = means(bare + share.format(0, "m") + others)
        assert point(found, "kv.blocks", "device", model=model, ranks="dp=0") == 24.0
        assert point(found, "rejected", "full", model="m", ranks=ranks) == 3.0
    # SGLang's tokens are of all ranks of a group, of which only the first tells its pool.
    found = means('sglang:kv_used_tokens{model_name="m",tp_rank="0"} 5\nsglang:prompt_tokens_total{model_name="m"} 9\n')
    assert point(found, "tokens", "prompt", model="m", engine="sglang") == 9.0


def test_older_vllm_names_mean_the_same() -> None:
    """V0's names become the same rows; a name whose unit changed between versions is left out, not guessed."""
    found = means('vllm:gpu_cache_usage_perc{model_name="m"} 0.5\nvllm:num_requests_swapped{model_name="m"} 2\n'
                  'vllm:time_per_output_token_seconds_sum{model_name="m"} 3.5\n'
                  'vllm:gpu_prefix_cache_queries_total{model_name="m"} 9\n')
    assert point(found, "kv.utilization", "device", model="m") == 0.5
    assert point(found, "requests", "swapped", model="m") == 2.0
    assert point(found, "phase.duration", "inter_token", model="m") == 3.5
    assert len(found.readings) == 3


def test_vllm_transfers() -> None:
    """Offloading is told once although 0.32 sends it under old names too; NIXL's histogram of bytes is its sum."""
    who = '{engine="1",model_name="m"'
    page = (f"vllm:kv_offload_load_bytes_total{who}}} 4096\n"
            f'vllm:kv_offload_total_bytes_total{who},transfer_type="CPU_to_GPU"}} 4096\n'
            f'vllm:kv_offload_total_bytes_total{who},transfer_type="GPU_to_CPU"}} 512\n'
            f"vllm:nixl_bytes_transferred_sum{who}}} 1048576\nvllm:nixl_bytes_transferred_count{who}}} 2\n"
            f'vllm:nixl_bytes_transferred_bucket{who},le="+Inf"}} 2\n'
            f"vllm:nixl_xfer_time_seconds_sum{who}}} 0.25\nvllm:nixl_xfer_time_seconds_count{who}}} 2\n"
            f"vllm:nixl_num_failed_transfers_total{who}}} 1\nvllm:kv_offload_allocation_failure_total{who}}} 3\n"
            f'vllm:mooncake_store_operation_bytes_total{who},operation="put",status="ok"}} 10\n'
            f'vllm:mooncake_store_operation_bytes_total{who},operation="put",status="error"}} 1\n')
    found, known = means(page), {"model": "m", "ranks": "dp=1"}
    assert point(found, "migration.io", "offload", "load", **known) == 4096.0
    assert point(found, "migration.io", "offload", "store", **known) == 512.0
    assert point(found, "migration.io", "nixl", "transfer", **known) == 1048576.0
    assert point(found, "migration.io", "mooncake_store", "put", **known) == 11.0
    assert point(found, "migration.duration", "nixl", "transfer", "transfer", **known) == 0.25
    assert point(found, "migration.operations", "nixl", "transfer", "transfer", **known) == 2.0
    assert point(found, "migration.failures", "nixl", "transfer", **known) == 1.0
    assert point(found, "kv.failures", "host", **known) == 3.0


def test_sglang() -> None:
    """SGLang 0.5.23: pools by state, retractions, transfers in MiB and ms; token_usage, a maximum, is not believed."""
    who = '{dp_rank="1",engine_type="unified",model_name="m",moe_ep_rank="0",pp_rank="0",tp_rank="2"'
    plain = {"full_token_usage": 0.25, "token_usage": 0.9, "kv_used_tokens": 100, "kv_evictable_tokens": 50,
             "kv_available_tokens": 250, "max_total_num_tokens": 400, "evicted_tokens_total": 32,
             "num_retracted_requests_total": 3, "kv_transfer_total_mb_sum": 1.5, "kv_transfer_latency_ms_sum": 250,
             "kv_transfer_latency_ms_count": 5, "load_back_bytes_total": 77, "swa_token_usage": 0.75}
    page = "".join(f"sglang:{name}{who}}} {value}\n" for name, value in plain.items())
    page += f'sglang:num_queue_reqs{who}}} 4\n' + f'sglang:num_queue_reqs{who},priority="7"}} 3\n'
    page += f'sglang:cached_tokens_total{who},cache_source="host"}} 11\n'
    page += f'sglang:prompt_tokens_total{who},is_streaming="true"}} 5\n'
    page += f'sglang:prompt_tokens_total{who},is_streaming="false"}} 6\n'
    found, known = means(page), {"model": "m", "ranks": "dp=1 tp=2 pp=0", "engine": "sglang"}
    assert point(found, "kv.utilization", "device", **known) == 0.25
    assert point(found, "kv.utilization", "swa", **known) == 0.75
    states = [point(found, "kv.tokens", "device", state, **known) for state in ("used", "evictable", "free")]
    assert states == [100.0, 50.0, 250.0]
    assert point(found, "kv.capacity", "device", **known) == sum(filter(None, states))
    assert point(found, "kv.evicted.tokens", "device", **known) == 32.0
    assert point(found, "preemptions", **known) == 3.0
    assert point(found, "migration.io", "disaggregation", "transfer", **known) == 1.5 * 2**20
    assert point(found, "migration.duration", "disaggregation", "transfer", "transfer", **known) == 0.25
    assert point(found, "migration.operations", "disaggregation", "transfer", "transfer", **known) == 5.0
    assert point(found, "migration.io", "offload", "load", **known) == 77.0
    assert point(found, "requests", "waiting", **known) == 4.0
    assert point(found, "prefix.hit", "host", **known) == 11.0
    assert point(found, "tokens", "prompt", **known) == 11.0
    assert found.dropped == {}


def test_lmcache() -> None:
    """LMCache's server under both its spellings of chunks, its tenants added up; inside an engine, remote ms are s."""
    page = ('lmcache_mp_l1_usage_ratio 0.4\nlmcache_mp_l1_memory_usage_bytes 34359738368\n'
            'lmcache_mp_l1_evicted_keys_total{cache_salt="a"} 3\nlmcache_mp_l1_evicted_keys_total{cache_salt="b"} 4\n'
            'lmcache_mp_l1_allocation_failure_chunks_total{during="l1_store",model_name="m"} 2\n'
            'lmcache_mp_lookup_requested_tokens_total{cache_salt="",model_name="m"} 1000\n'
            'lmcache_mp_lookup_hit_tokens_total{cache_salt="",model_name="m"} 280\n')
    found = means(page)
    assert point(found, "kv.utilization", "host", model="", engine="lmcache") == 0.4
    assert point(found, "kv.usage", "host", model="", engine="lmcache") == 32 * 2**30
    assert point(found, "kv.evicted.chunks", "host", model="", engine="lmcache") == 7.0
    assert point(found, "kv.failures", "host", model="m", engine="lmcache") == 2.0
    assert point(found, "prefix.queried", "lmcache", model="m", engine="lmcache") == 1000.0
    assert point(found, "prefix.hit", "lmcache", model="m", engine="lmcache") == 280.0
    newer = means('lmcache_mp_l1_evicted_chunks_total 5\nlmcache_mp_l1_usage_ratio{l1_tag="a"} 0.5\n'
                  'lmcache_mp_l1_usage_ratio{l1_tag="b"} 0.75\n')
    assert point(newer, "kv.evicted.chunks", "host", model="", engine="lmcache") == 5.0
    assert (len(newer.readings), newer.dropped) == (1, {"ambiguous": 2})
    within = means('lmcache:local_cache_usage{model_name="m",worker_id="1"} 64\n'
                   'lmcache:remote_time_to_get_sum{model_name="m",worker_id="1"} 1500\n'
                   'lmcache:remote_time_to_get_count{model_name="m",worker_id="1"} 3\n')
    known = {"model": "m", "ranks": "worker=1", "engine": "lmcache"}
    assert point(within, "kv.usage", "host", **known) == 64.0
    assert point(within, "migration.duration", "lmcache", "load", "remote", **known) == 1.5
    assert point(within, "migration.operations", "lmcache", "load", "remote", **known) == 3.0


def test_tgi() -> None:
    """TGI: batch and queue, tokens from its histograms' sums, failures of all kinds together; it names no KV metric."""
    found = means("tgi_batch_current_size 8\ntgi_queue_size 5\ntgi_request_success 250\n"
                  'tgi_request_failure{err="overloaded"} 2\ntgi_request_failure{err="validation"} 1\n'
                  "tgi_request_generated_tokens_sum 64000\ntgi_request_generated_tokens_count 250\n"
                  "tgi_request_queue_duration_sum 12.5\ntgi_request_queue_duration_count 250\n"
                  "tgi_batch_current_max_tokens 2048\n")
    known = {"model": "", "engine": "tgi"}
    assert point(found, "requests", "running", **known) == 8.0
    assert point(found, "requests", "waiting", **known) == 5.0
    assert point(found, "finished", "success", **known) == 250.0
    assert point(found, "finished", "failure", **known) == 3.0
    assert point(found, "tokens", "generation", **known) == 64000.0
    assert point(found, "phase.duration", "queue", **known) == 12.5
    assert point(found, "phase.observations", "queue", **known) == 250.0
    assert not [name for name, _, _ in found.readings if ".kv." in name]


def test_llama_cpp() -> None:
    """llama.cpp: older servers tell their cache, newer ones do not and then it is absent; averages are left out."""
    common = ("llamacpp:prompt_tokens_total 6886\nllamacpp:tokens_predicted_total 3469\n"
              "llamacpp:prompt_seconds_total 2903.63\nllamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"
              "llamacpp:prompt_tokens_seconds 2.37151\n")
    known = {"model": "", "engine": "llama.cpp"}
    older = means(common + "llamacpp:kv_cache_usage_ratio 0.81\nllamacpp:kv_cache_tokens 32768\n")
    newer = means(common + "llamacpp:prompt_tokens_cached_total 12\n")
    for found in (older, newer):
        assert point(found, "tokens", "prompt", **known) == 6886.0
        assert point(found, "tokens", "generation", **known) == 3469.0
        assert point(found, "phase.duration", "prefill", **known) == 2903.63
        assert point(found, "requests", "running", **known) == 1.0
        assert point(found, "requests", "waiting", **known) == 2.0
    assert point(older, "kv.utilization", "device", **known) == 0.81
    assert point(older, "kv.tokens", "device", "used", **known) == 32768.0
    assert point(newer, "kv.utilization", "device", **known) is None
    assert point(newer, "prefix.hit", "device", **known) == 12.0
    assert 2.37151 not in [value for _, _, value in newer.readings]
