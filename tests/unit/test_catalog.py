"""The catalog: names in both worlds, from a table written by hand after OpenTelemetry's translation rules."""

from __future__ import annotations

import re

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
    "kvobs.step.duration": ("histogram", "s", "kvobs_step_duration_seconds"),
    "kvobs.step.tokens": ("counter", "{token}", "kvobs_step_tokens_total"),
    "kvobs.turns": ("counter", "{turn}", "kvobs_turns_total"),
    "gen_ai.server.request.duration": ("histogram", "s", "gen_ai_server_request_duration_seconds"),
    "gen_ai.server.time_to_first_token": ("histogram", "s", "gen_ai_server_time_to_first_token_seconds"),
    "gen_ai.server.time_per_output_token": ("histogram", "s", "gen_ai_server_time_per_output_token_seconds"),
    "gen_ai.client.token.usage": ("histogram", "{token}", "gen_ai_client_token_usage"),
    "kvobs.out_of_memory": ("counter", "{error}", "kvobs_out_of_memory_total"),
    "kvobs.alloc.latency": ("histogram", "s", "kvobs_alloc_latency_seconds"),
    "kvobs.allocator.usage": ("gauge", "By", "kvobs_allocator_usage_bytes"),
    "kvobs.window.fragmentation": ("gauge", "1", "kvobs_window_fragmentation_ratio"),
    "kvobs.window.largest_free": ("gauge", "By", "kvobs_window_largest_free_bytes"),
    "kvobs.window.allocation.variance": ("gauge", "s2", "kvobs_window_allocation_variance_s2"),
    "kvobs.window.step.mean": ("gauge", "s", "kvobs_window_step_mean_seconds"),
    "kvobs.window.step.variance": ("gauge", "s2", "kvobs_window_step_variance_s2"),
    "kvobs.self.events": ("counter", "{event}", "kvobs_self_events_total"),
    "kvobs.self.events.dropped": ("counter", "{event}", "kvobs_self_events_dropped_total"),
    "kvobs.self.hook.duration": ("counter", "s", "kvobs_self_hook_duration_seconds_total"),
    "kvobs.self.hook.failures": ("counter", "{failure}", "kvobs_self_hook_failures_total"),
    "kvobs.self.fold.duration": ("counter", "s", "kvobs_self_fold_duration_seconds_total"),
    "kvobs.self.window.duration": ("counter", "s", "kvobs_self_window_duration_seconds_total"),
    "kvobs.self.series.overflow": ("counter", "{point}", "kvobs_self_series_overflow_total"),
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
    assert re.fullmatch(r"(kvobs|gen_ai)(\.[a-z][a-z0-9_]*)+", row.name)
    assert not {"total", "bytes", "seconds", "ratio", "count", "ms", "ns"} & set(re.split(r"[._]", row.name))
    assert re.fullmatch(r"[a-z_]+[a-z0-9_]*", prometheus_name(row))
    assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", prometheus_label(attribute)) for attribute in row.attributes)
    assert len(set(map(prometheus_label, row.attributes))) == len(row.attributes)


@pytest.mark.parametrize("row", ROWS, ids=ids)
def test_attributes_are_bounded(row: Row) -> None:
    """Sessions, requests, users and traces are never attributes of a metric."""
    words = {word for attribute in row.attributes for word in re.split(r"[._]", attribute)}
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


def test_maxima_do_not_sum_over_ranks() -> None:
    """Ratios, extremes, means, variances and yes/no facts never sum over ranks; bytes and counts do."""
    for row in ROWS:
        extreme = row.unit in ("1", "s2") or bool({"largest", "largest_free", "mean", "availability"}
                                                  & set(row.name.split(".")))
        least = row.name.endswith("largest_free")
        assert row.across_ranks == ("min" if least else "max" if extreme else "sum"), row.name


def test_markdown_has_one_line_per_row() -> None:
    """The generated table has a header, a rule and one line per row with as many cells as the header."""
    lines = catalog.markdown().splitlines()
    assert len(lines) == 2 + len(ROWS)
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    for row, line in zip(ROWS, lines[2:], strict=True):
        assert line.startswith(f"| `{row.name}` | `{TABLE[row.name][2]}` | {row.kind} | `{row.unit}` |")
        assert row.meaning in line
        assert row.formula in line
