"""The catalog: names in both worlds, from a table written by hand after OpenTelemetry's translation rules."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable

import pytest

from kvobs import catalog
from kvobs.catalog import BY_NAME, ROWS, Row, prometheus_label, prometheus_name

# OpenTelemetry name: (kind, unit, Prometheus name). Written by hand; a renamed metric is a broken dashboard.
TABLE = {
    "kvobs.kv.usage": ("gauge", "By", "kvobs_kv_usage_bytes"),
    "kvobs.kv.buffer.largest": ("gauge", "By", "kvobs_kv_buffer_largest_bytes"),
    "kvobs.kv.caches": ("gauge", "{cache}", "kvobs_kv_caches"),
    "kvobs.kv.fragmentation.article": ("gauge", "1", "kvobs_kv_fragmentation_article_ratio"),
    "kvobs.kv.reallocations": ("counter", "{reallocation}", "kvobs_kv_reallocations_total"),
    "kvobs.kv.written": ("counter", "By", "kvobs_kv_written_bytes_total"),
    "kvobs.kv.copied": ("counter", "By", "kvobs_kv_copied_bytes_total"),
    "kvobs.kv.blocks": ("gauge", "{block}", "kvobs_kv_blocks"),
    "kvobs.kv.block.allocations": ("counter", "{block}", "kvobs_kv_block_allocations_total"),
    "kvobs.kv.block.failures": ("counter", "{failure}", "kvobs_kv_block_failures_total"),
    "kvobs.kv.preemptions": ("counter", "{request}", "kvobs_kv_preemptions_total"),
    "kvobs.migration.io": ("counter", "By", "kvobs_migration_io_bytes_total"),
    "kvobs.migration.operations": ("counter", "{operation}", "kvobs_migration_operations_total"),
    "kvobs.migration.duration": ("histogram", "s", "kvobs_migration_duration_seconds"),
    "kvobs.device.copy.io": ("counter", "By", "kvobs_device_copy_io_bytes_total"),
    "kvobs.device.copy.operations": ("counter", "{operation}", "kvobs_device_copy_operations_total"),
    "kvobs.step.duration": ("histogram", "s", "kvobs_step_duration_seconds"),
    "kvobs.step.tokens": ("counter", "{token}", "kvobs_step_tokens_total"),
    "kvobs.turns": ("counter", "{turn}", "kvobs_turns_total"),
    "gen_ai.server.request.duration": ("histogram", "s", "gen_ai_server_request_duration_seconds"),
    "gen_ai.server.time_to_first_token": ("histogram", "s", "gen_ai_server_time_to_first_token_seconds"),
    "gen_ai.server.time_per_output_token": ("histogram", "s", "gen_ai_server_time_per_output_token_seconds"),
    "gen_ai.client.token.usage": ("histogram", "{token}", "gen_ai_client_token_usage"),
    "kvobs.out_of_memory": ("counter", "{error}", "kvobs_out_of_memory_total"),
    "kvobs.kv.block.touches": ("counter", "{block}", "kvobs_kv_block_touches_total"),
    "kvobs.kv.block.evictions": ("counter", "{block}", "kvobs_kv_block_evictions_total"),
    "kvobs.kv.eviction.age": ("histogram", "s", "kvobs_kv_eviction_age_seconds"),
    "kvobs.kv.eviction.idle": ("histogram", "s", "kvobs_kv_eviction_idle_seconds"),
    "kvobs.kv.admission.failures": ("counter", "{failure}", "kvobs_kv_admission_failures_total"),
    "kvobs.kv.preemption.tokens": ("counter", "{token}", "kvobs_kv_preemption_tokens_total"),
    "kvobs.kv.recomputed": ("counter", "{token}", "kvobs_kv_recomputed_total"),
    "kvobs.prefix.queried": ("counter", "{token}", "kvobs_prefix_queried_total"),
    "kvobs.prefix.hit": ("counter", "{token}", "kvobs_prefix_hit_total"),
    "kvobs.kv.tail": ("gauge", "{token}", "kvobs_kv_tail"),
    "kvobs.kv.tail.usage": ("gauge", "By", "kvobs_kv_tail_usage_bytes"),
    "kvobs.kv.unexplained": ("gauge", "{block}", "kvobs_kv_unexplained"),
    "kvobs.requests": ("gauge", "{request}", "kvobs_requests"),
    "kvobs.request.slots": ("gauge", "{request}", "kvobs_request_slots"),
    "kvobs.request.next": ("gauge", "{block}", "kvobs_request_next"),
    "kvobs.request.phase.duration": ("histogram", "s", "kvobs_request_phase_duration_seconds"),
    "kvobs.process.role": ("gauge", "{process}", "kvobs_process_role"),
    "kvobs.engine.up": ("gauge", "{target}", "kvobs_engine_up"),
    "kvobs.engine.age": ("gauge", "s", "kvobs_engine_age_seconds"),
    "kvobs.engine.scrape.duration": ("gauge", "s", "kvobs_engine_scrape_duration_seconds"),
    "kvobs.engine.scrape.series": ("gauge", "{series}", "kvobs_engine_scrape_series"),
    "kvobs.engine.scrapes": ("counter", "{scrape}", "kvobs_engine_scrapes_total"),
    "kvobs.engine.scrape.dropped": ("counter", "{sample}", "kvobs_engine_scrape_dropped_total"),
    "kvobs.engine.kv.utilization": ("gauge", "1", "kvobs_engine_kv_utilization_ratio"),
    "kvobs.engine.kv.tokens": ("gauge", "{token}", "kvobs_engine_kv_tokens"),
    "kvobs.engine.kv.capacity": ("gauge", "{token}", "kvobs_engine_kv_capacity"),
    "kvobs.engine.kv.blocks": ("gauge", "{block}", "kvobs_engine_kv_blocks"),
    "kvobs.engine.kv.usage": ("gauge", "By", "kvobs_engine_kv_usage_bytes"),
    "kvobs.engine.kv.evicted.tokens": ("counter", "{token}", "kvobs_engine_kv_evicted_tokens_total"),
    "kvobs.engine.kv.evicted.chunks": ("counter", "{chunk}", "kvobs_engine_kv_evicted_chunks_total"),
    "kvobs.engine.kv.residency.duration": ("counter", "s", "kvobs_engine_kv_residency_duration_seconds_total"),
    "kvobs.engine.kv.residency.blocks": ("counter", "{block}", "kvobs_engine_kv_residency_blocks_total"),
    "kvobs.engine.kv.failures": ("counter", "{failure}", "kvobs_engine_kv_failures_total"),
    "kvobs.engine.requests": ("gauge", "{request}", "kvobs_engine_requests"),
    "kvobs.engine.waiting": ("gauge", "{request}", "kvobs_engine_waiting"),
    "kvobs.engine.finished": ("counter", "{request}", "kvobs_engine_finished_total"),
    "kvobs.engine.rejected": ("counter", "{request}", "kvobs_engine_rejected_total"),
    "kvobs.engine.preemptions": ("counter", "{request}", "kvobs_engine_preemptions_total"),
    "kvobs.engine.tokens": ("counter", "{token}", "kvobs_engine_tokens_total"),
    "kvobs.engine.prefix.queried": ("counter", "{token}", "kvobs_engine_prefix_queried_total"),
    "kvobs.engine.prefix.hit": ("counter", "{token}", "kvobs_engine_prefix_hit_total"),
    "kvobs.engine.migration.io": ("counter", "By", "kvobs_engine_migration_io_bytes_total"),
    "kvobs.engine.migration.duration": ("counter", "s", "kvobs_engine_migration_duration_seconds_total"),
    "kvobs.engine.migration.operations": ("counter", "{operation}", "kvobs_engine_migration_operations_total"),
    "kvobs.engine.migration.failures": ("counter", "{failure}", "kvobs_engine_migration_failures_total"),
    "kvobs.engine.phase.duration": ("counter", "s", "kvobs_engine_phase_duration_seconds_total"),
    "kvobs.engine.phase.observations": ("counter", "{observation}", "kvobs_engine_phase_observations_total"),
    "kvobs.alloc.latency": ("histogram", "s", "kvobs_alloc_latency_seconds"),
    "kvobs.alloc.operations": ("counter", "{operation}", "kvobs_alloc_operations_total"),
    "kvobs.alloc.io": ("counter", "By", "kvobs_alloc_io_bytes_total"),
    "kvobs.alloc.slow": ("counter", "{allocation}", "kvobs_alloc_slow_total"),
    "kvobs.alloc.interval": ("gauge", "{allocation}", "kvobs_alloc_interval"),
    "kvobs.allocator.usage": ("gauge", "By", "kvobs_allocator_usage_bytes"),
    "kvobs.window.fragmentation": ("gauge", "1", "kvobs_window_fragmentation_ratio"),
    "kvobs.window.largest_free": ("gauge", "By", "kvobs_window_largest_free_bytes"),
    "kvobs.window.allocation.variance": ("gauge", "s2", "kvobs_window_allocation_variance_s2"),
    "kvobs.window.step.mean": ("gauge", "s", "kvobs_window_step_mean_seconds"),
    "kvobs.window.step.variance": ("gauge", "s2", "kvobs_window_step_variance_s2"),
    "kvobs.attention.queries": ("counter", "{query}", "kvobs_attention_queries_total"),
    "kvobs.attention.local": ("counter", "1", "kvobs_attention_local_total"),
    "kvobs.attention.chance": ("counter", "1", "kvobs_attention_chance_total"),
    "kvobs.attention.entries": ("counter", "{entry}", "kvobs_attention_entries_total"),
    "kvobs.attention.transitions": ("counter", "{transition}", "kvobs_attention_transitions_total"),
    "kvobs.attention.blocks": ("gauge", "{block}", "kvobs_attention_blocks"),
    "kvobs.attention.reclaimable": ("gauge", "By", "kvobs_attention_reclaimable_bytes"),
    "kvobs.attention.interval": ("gauge", "{step}", "kvobs_attention_interval"),
    "kvobs.kv.update.duration": ("histogram", "s", "kvobs_kv_update_duration_seconds"),
    "kvobs.allocator.requested": ("gauge", "By", "kvobs_allocator_requested_bytes"),
    "kvobs.allocator.active": ("gauge", "By", "kvobs_allocator_active_bytes"),
    "kvobs.allocator.inactive_split": ("gauge", "By", "kvobs_allocator_inactive_split_bytes"),
    "kvobs.allocator.segments": ("gauge", "{segment}", "kvobs_allocator_segments"),
    "kvobs.allocator.retries": ("counter", "{retry}", "kvobs_allocator_retries_total"),
    "kvobs.allocator.out_of_memory": ("counter", "{error}", "kvobs_allocator_out_of_memory_total"),
    "kvobs.allocator.device.operations": ("counter", "{operation}", "kvobs_allocator_device_operations_total"),
    "kvobs.allocator.setting": ("gauge", "{setting}", "kvobs_allocator_setting"),
    "kvobs.heap.usage": ("gauge", "By", "kvobs_heap_usage_bytes"),
    "kvobs.heap.trimmable": ("gauge", "By", "kvobs_heap_trimmable_bytes"),
    "kvobs.device.memory": ("gauge", "By", "kvobs_device_memory_bytes"),
    "hw.gpu.memory.usage": ("gauge", "By", "hw_gpu_memory_usage_bytes"),
    "hw.gpu.memory.limit": ("gauge", "By", "hw_gpu_memory_limit_bytes"),
    "hw.gpu.memory.utilization": ("gauge", "1", "hw_gpu_memory_utilization_ratio"),
    "hw.gpu.utilization": ("gauge", "1", "hw_gpu_utilization_ratio"),
    "hw.power": ("gauge", "W", "hw_power_watts"),
    "hw.energy": ("counter", "J", "hw_energy_joules_total"),
    "hw.temperature": ("gauge", "Cel", "hw_temperature_celsius"),
    "process.memory.usage": ("gauge", "By", "process_memory_usage_bytes"),
    "process.memory.virtual": ("gauge", "By", "process_memory_virtual_bytes"),
    "process.thread.count": ("gauge", "{thread}", "process_thread_count"),
    "process.cpu.time": ("counter", "s", "process_cpu_time_seconds_total"),
    "process.paging.faults": ("counter", "{fault}", "process_paging_faults_total"),
    "process.context_switches": ("counter", "{context_switch}", "process_context_switches_total"),
    "system.memory.limit": ("gauge", "By", "system_memory_limit_bytes"),
    "system.memory.usage": ("gauge", "By", "system_memory_usage_bytes"),
    "kvobs.host.hugepages": ("gauge", "{page}", "kvobs_host_hugepages"),
    "kvobs.host.thp": ("gauge", "By", "kvobs_host_thp_bytes"),
    "kvobs.host.numa.usage": ("gauge", "By", "kvobs_host_numa_usage_bytes"),
    "kvobs.host.numa.allocations": ("counter", "{page}", "kvobs_host_numa_allocations_total"),
    "kvobs.host.pressure": ("counter", "s", "kvobs_host_pressure_seconds_total"),
    "kvobs.host.cgroup.memory": ("gauge", "By", "kvobs_host_cgroup_memory_bytes"),
    "kvobs.host.cgroup.events": ("counter", "{event}", "kvobs_host_cgroup_events_total"),
    "kvobs.slo.events": ("counter", "{event}", "kvobs_slo_events_total"),
    "kvobs.slo.good": ("counter", "{event}", "kvobs_slo_good_total"),
    "kvobs.slo.target": ("gauge", "1", "kvobs_slo_target_ratio"),
    "kvobs.slo.burn": ("gauge", "1", "kvobs_slo_burn_ratio"),
    "kvobs.slo.budget": ("gauge", "1", "kvobs_slo_budget_ratio"),
    "kvobs.slo.alert": ("gauge", "{alert}", "kvobs_slo_alert"),
    "kvobs.breaker.level": ("gauge", "{level}", "kvobs_breaker_level"),
    "kvobs.breaker.transitions": ("counter", "{transition}", "kvobs_breaker_transitions_total"),
    "kvobs.breaker.actions": ("counter", "{action}", "kvobs_breaker_actions_total"),
    "kvobs.breaker.late": ("counter", "{action}", "kvobs_breaker_late_total"),
    "kvobs.breaker.regained": ("counter", "By", "kvobs_breaker_regained_bytes_total"),
    "kvobs.admission.requests": ("counter", "{request}", "kvobs_admission_requests_total"),
    "kvobs.http.requests": ("counter", "{request}", "kvobs_http_requests_total"),
    "kvobs.http.failures": ("counter", "{request}", "kvobs_http_failures_total"),
    "kvobs.breaker.action.duration": ("histogram", "s", "kvobs_breaker_action_duration_seconds"),
    "kvobs.flight.records": ("counter", "{record}", "kvobs_flight_records_total"),
    "kvobs.self.events": ("counter", "{event}", "kvobs_self_events_total"),
    "kvobs.self.events.dropped": ("counter", "{event}", "kvobs_self_events_dropped_total"),
    "kvobs.self.hook.duration": ("counter", "s", "kvobs_self_hook_duration_seconds_total"),
    "kvobs.self.hook.failures": ("counter", "{failure}", "kvobs_self_hook_failures_total"),
    "kvobs.self.fold.duration": ("counter", "s", "kvobs_self_fold_duration_seconds_total"),
    "kvobs.self.window.duration": ("counter", "s", "kvobs_self_window_duration_seconds_total"),
    "kvobs.self.drain.duration": ("counter", "s", "kvobs_self_drain_duration_seconds_total"),
    "kvobs.self.poll.duration": ("counter", "s", "kvobs_self_poll_duration_seconds_total"),
    "kvobs.self.overhead": ("gauge", "1", "kvobs_self_overhead_ratio"),
    "kvobs.self.throttle": ("gauge", "{level}", "kvobs_self_throttle"),
    "kvobs.self.paused": ("counter", "s", "kvobs_self_paused_seconds_total"),
    "kvobs.self.turns.cut": ("counter", "{turn}", "kvobs_self_turns_cut_total"),
    "kvobs.self.series.overflow": ("counter", "{point}", "kvobs_self_series_overflow_total"),
    "kvobs.self.store.pruned": ("counter", "{item}", "kvobs_self_store_pruned_total"),
    "kvobs.self.store.size": ("gauge", "By", "kvobs_self_store_size_bytes"),
    "kvobs.availability": ("gauge", "{subject}", "kvobs_availability"),
}
ids = [row.name for row in ROWS]


def test_the_table_covers_the_catalog() -> None:
    """Every row is in the hand-written table and every line of the table is a row."""
    assert set(TABLE) == {row.name for row in ROWS} == set(BY_NAME)


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_a_row_has_the_name_kind_and_unit_of_the_table(row: Row) -> None:
    """Kind, unit and Prometheus name are those that were written by hand."""
    assert (row.kind, row.unit, prometheus_name(row)) == TABLE[row.name]


def test_prometheus_families_do_not_collide() -> None:
    """No two rows share a family name, nor a sample name with a histogram's or counter's suffixes."""
    samples: list[str] = []
    for row in ROWS:
        name = prometheus_name(row)
        samples += [name + end for end in ("_bucket", "_sum", "_count")] if row.kind == "histogram" else [name]
    assert len(samples) == len(set(samples))


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_names_follow_the_conventions(row: Row) -> None:
    """Dotted lower case; no unit and no ``total`` in an OpenTelemetry name; valid Prometheus names and labels."""
    assert re.fullmatch(r"(kvobs|gen_ai|hw|process|system)(\.[a-z][a-z0-9_]*)+", row.name)
    words = set(re.split(r"[._]", row.name)) - ({"count"} if row.name == "process.thread.count" else set())
    assert not {"total", "bytes", "seconds", "ratio", "count", "ms", "ns"} & words
    assert re.fullmatch(r"[a-z_]+[a-z0-9_]*", prometheus_name(row))
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", prometheus_label(attribute)) for attribute in row.attributes)
    assert len(set(map(prometheus_label, row.attributes))) == len(row.attributes)


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_attributes_are_bounded(row: Row) -> None:
    """Sessions, requests, users and traces are never attributes of a metric; the one identifier is a device's."""
    words = {word for attribute in row.attributes if attribute != "hw.id" for word in re.split(r"[._]", attribute)}
    assert not words & {"session", "conversation", "user", "tenant", "trace", "span", "prompt", "id"}
    assert not {"le", "quantile", "job", "instance"} & set(row.attributes)


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_rows_say_what_they_mean(row: Row) -> None:
    """The meaning is a whole sentence, the formula is not empty, neither breaks a Markdown table."""
    assert row.meaning[0].isupper() or row.meaning[0].isdigit()
    assert row.meaning.endswith(".")
    assert row.formula
    assert "|" not in row.meaning + row.formula
    assert "\n" not in row.meaning + row.formula


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind == "histogram"], ids=lambda row: row.name)
def test_histograms_have_rising_buckets(row: Row) -> None:
    """Bucket boundaries are positive and strictly rising; other kinds have none."""
    assert row.buckets[0] > 0
    assert all(low < high for low, high in zip(row.buckets, row.buckets[1:], strict=False))


def test_only_histograms_have_buckets() -> None:
    """A counter or gauge with buckets would be a mistake in the table."""
    assert all(bool(row.buckets) == (row.kind == "histogram") for row in ROWS)


def test_the_objective_is_a_boundary() -> None:
    """12 ms, the allocation-latency objective, is a boundary of the histogram it judges, from 1 µs to 2.5 s."""
    buckets = BY_NAME["kvobs.alloc.latency"].buckets
    assert 0.012 in buckets
    assert (buckets[0], buckets[-1]) == (1e-6, 2.5)


# What every rank of a machine sees alike, and states of which the sum says nothing.
SEEN_BY_ALL = ("hw.", "system.", "kvobs.host.hugepages", "kvobs.host.numa.", "kvobs.host.pressure",
               "kvobs.host.cgroup.", "kvobs.device.memory")
STATES = {"kvobs.availability", "kvobs.alloc.interval", "kvobs.allocator.setting", "kvobs.attention.interval",
          "kvobs.self.throttle", "kvobs.process.role", "kvobs.engine.age", "kvobs.engine.scrape.duration",
          "kvobs.slo.alert", "kvobs.breaker.level"}


def test_only_what_adds_up_sums_over_ranks() -> None:
    """Ratios, extremes, means, variances, states and what all ranks see alike never sum; bytes and counts do."""
    for row in ROWS:
        extreme = row.unit == "s2" or (row.unit == "1" and row.kind == "gauge") or bool(
            {"largest", "largest_free", "mean"} & set(row.name.split(".")))
        least = row.name.endswith("largest_free") or row.name == "kvobs.slo.budget"
        alike = row.name.startswith(SEEN_BY_ALL) or row.name in STATES
        assert row.across_ranks == ("min" if least else "max" if extreme or alike else "sum"), row.name


class Meter:
    """Takes down what the conventions' own package creates: name, kind and unit."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[str, str]] = {}

    def __getattr__(self, create: str) -> Callable[..., None]:
        kind = create.removeprefix("create_").removeprefix("observable_")
        return lambda name, unit="", **_: self.made.update({name: (kind, unit)})


def test_standard_metrics_are_those_of_the_conventions() -> None:
    """Names, kinds, units and attribute keys outside kvobs.* are in OpenTelemetry's published conventions."""
    metrics = pytest.importorskip("opentelemetry.semconv._incubating.metrics",
                                  reason="opentelemetry-semantic-conventions is not installed.")
    meter = Meter()
    keys = set()
    for area in ("hw", "process", "system", "gen_ai"):
        module = importlib.import_module(f"{metrics.__name__}.{area}_metrics")
        for create in [value for name, value in vars(module).items() if name.startswith("create_")]:
            create(meter, *[None] * (len(inspect.signature(create).parameters) - 1))
    for area in ("hw", "process", "system", "gen_ai", "cpu"):
        module = importlib.import_module(f"opentelemetry.semconv._incubating.attributes.{area}_attributes")
        keys |= {value for value in vars(module).values() if isinstance(value, str)}
    if "system.paging.fault.type" not in keys:
        pytest.skip("The installed opentelemetry-semantic-conventions are older than the names that kvobs follows.")
    for row in ROWS:
        if not row.name.startswith("kvobs."):
            kind, unit = meter.made[row.name]
            assert ("gauge" if kind == "up_down_counter" else kind, unit) == (row.kind, row.unit), row.name
            assert set(row.attributes) <= keys, row.name


def test_markdown_has_one_line_per_row() -> None:
    """The generated table has a header, a rule and one line per row with as many cells as the header."""
    lines = catalog.markdown().splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    for row, line in zip(ROWS, lines[2:], strict=True):
        assert line.startswith(f"| `{row.name}` | `{TABLE[row.name][2]}` | {row.kind} | `{row.unit}` |")
        assert row.meaning in line
        assert row.formula in line
