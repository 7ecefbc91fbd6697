"""The catalog: every metric once. Exporters, docs, dashboards and alerts derive from these rows.

Units are UCUM; a counter or gauge may sum over ranks only where ``across_ranks`` says ``sum``. ``nature``
labels every value that is not an exact count or a direct measurement.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Ranks = Literal["sum", "max", "min"]

# Seconds. The article's allocation-latency objective (S9); every SLO threshold is a boundary.
SLOW_ALLOCATION = 0.012
LATENCY_BUCKETS = (1e-6, 1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, SLOW_ALLOCATION, 0.025, 0.05, 0.1, 0.25, 0.5,
                   1.0, 2.5)
# Of native counters, which time in ns.
LATENCY_BOUNDS_NS = tuple(round(bound * 1e9) for bound in LATENCY_BUCKETS)
SLOW_BUCKET = LATENCY_BUCKETS.index(SLOW_ALLOCATION) + 1  # the first of those that are slow
STEP_BUCKETS = (1e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# The boundaries that the OpenTelemetry GenAI conventions advise for these standard instruments.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric: its OpenTelemetry name, kind, unit, attributes, and what it means."""

    name: str
    kind: Kind
    unit: str
    attributes: tuple[str, ...]
    meaning: str
    formula: str
    across_ranks: Ranks = "sum"
    nature: Literal["exact", "measured", "estimated", "modelled"] = "exact"
    buckets: tuple[float, ...] = ()


_WINDOW = " (64 ms unless window_ms says otherwise)."
_WHO = ("model", "device", "cache")
_LAYERS = ("model", "device", "layers")
_GPU = ("hw.id", "hw.name")
_HARDWARE = ("hw.id", "hw.type", "hw.name")
_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")


def _counter(name: str, unit: str, attributes: tuple[str, ...], meaning: str, formula: str,
             nature: Literal["exact", "measured"] = "exact", across_ranks: Ranks = "sum") -> Row:
    return Row(name=name, kind="counter", unit=unit, attributes=attributes, meaning=meaning, formula=formula,
               across_ranks=across_ranks, nature=nature)


def _gauge(name: str, unit: str, attributes: tuple[str, ...], meaning: str, formula: str,
           across_ranks: Ranks = "sum", nature: Literal["exact", "measured"] = "exact") -> Row:
    return Row(name=name, kind="gauge", unit=unit, attributes=attributes, meaning=meaning, formula=formula,
               across_ranks=across_ranks, nature=nature)


def _histogram(name: str, unit: str, attributes: tuple[str, ...], buckets: tuple[float, ...], meaning: str,
               formula: str) -> Row:
    return Row(name=name, kind="histogram", unit=unit, attributes=attributes, meaning=meaning, formula=formula,
               nature="measured", buckets=buckets)


ROWS: tuple[Row, ...] = (
    _gauge("kvobs.kv.usage", "By", (*_WHO, "state"),
           "KV-cache bytes of all live caches: held by tokens, or slack (reserved but holding none).",
           "held = tokens x bytes per token; slack = bytes of the storages - held"),
    _gauge("kvobs.kv.buffer.largest", "By", _WHO, "The largest single contiguous KV buffer of any live cache.",
           "max over live K and V storages", across_ranks="max"),
    _gauge("kvobs.kv.caches", "{cache}", _WHO, "Caches that are alive and hold KV.", "count of live caches"),
    _gauge("kvobs.kv.fragmentation.article", "1", _WHO,
           "The reference article's fragmentation rate over KV buffers; its definition, not a measure of waste.",
           "(total - largest contiguous) / total", across_ranks="max"),
    _counter("kvobs.kv.reallocations", "{reallocation}", (*_WHO, "phase"),
             "K or V buffers replaced by a new storage; a dynamic layer's first fill replaces its empty buffer.",
             "storage address changes seen by the sweep after each step"),
    _counter("kvobs.kv.written", "By", _WHO, "KV bytes of new tokens.", "new tokens x bytes per token"),
    _counter("kvobs.kv.copied", "By", _WHO, "KV bytes copied again because a buffer was replaced.",
             "bytes of the new storage - bytes written"),
    _gauge("kvobs.kv.blocks", "{block}", (*_WHO, "state"),
           "Blocks of a paged pool: used by requests, cached (reusable prefixes) or free.", "the pool's own ledger"),
    _counter("kvobs.kv.block.allocations", "{block}", _WHO, "Blocks a paged pool handed out.",
             "blocks handed out since the pool began"),
    _counter("kvobs.kv.block.failures", "{failure}", _WHO, "Requests for blocks that a paged pool refused.",
             "refusals since the pool began"),
    _counter("kvobs.kv.preemptions", "{request}", _WHO, "Requests that lost their blocks to others.",
             "requests reset or offloaded by the scheduler"),
    _counter("kvobs.migration.io", "By", ("src", "dst"), "KV bytes that changed device.",
             "bytes of moved K and V buffers"),
    _counter("kvobs.migration.operations", "{operation}", ("src", "dst"), "KV buffers that changed device.",
             "count of moved K and V buffers"),
    _histogram("kvobs.migration.duration", "s", ("src", "dst"), LATENCY_BUCKETS,
               "Host time of calls that move KV; absent for moves only seen afterwards.", "end - start of the call"),
    _counter("kvobs.device.copy.io", "By", ("src", "dst"),
             "Bytes of copies of tensors between devices, as the accelerator counts them; told by a virtual GPU only.",
             "bytes of the copies the accelerator made"),
    _counter("kvobs.device.copy.operations", "{operation}", ("src", "dst"),
             "Copies of tensors between devices, as the accelerator counts them; told by a virtual GPU only.",
             "count of the copies the accelerator made"),
    _histogram("kvobs.step.duration", "s", ("model", "device", "phase"), STEP_BUCKETS,
               "Duration of forward passes.", "end - start of the top-level forward"),
    _counter("kvobs.step.tokens", "{token}", ("model", "device", "phase"), "Token positions computed.",
             "rows x query length per step"),
    _counter("kvobs.turns", "{turn}", ("model", "outcome"), "Generate calls and requests that ended.",
             "count by outcome: ok, error, cancelled, out_of_memory"),
    _histogram("gen_ai.server.request.duration", "s", _GEN_AI, REQUEST_BUCKETS, "Duration of generate calls.",
               "end - start of the call"),
    _histogram("gen_ai.server.time_to_first_token", "s", _GEN_AI, TTFT_BUCKETS, "Time to the first token.",
               "first token known to the host - start of the call"),
    _histogram("gen_ai.server.time_per_output_token", "s", _GEN_AI, TPOT_BUCKETS,
               "Mean time per output token after the first.", "(end - first token) / (new tokens per row - 1)"),
    _histogram("gen_ai.client.token.usage", "{token}", (*_GEN_AI, "gen_ai.token.type"), TOKEN_BUCKETS,
               "Tokens used per call, input and output.", "prompt tokens; new tokens"),
    _counter("kvobs.out_of_memory", "{error}", ("model",), "Engine calls that ended in an out-of-memory error.",
             "count of errors"),
    _histogram("kvobs.alloc.latency", "s", ("device",), LATENCY_BUCKETS,
               "Latency of requests to the memory allocator; one of kvobs.alloc.interval is timed, at random. "
               "A virtual GPU's device calls may take modelled times: then kvobs.allocator.setting says so.",
               "end - start of the allocation"),
    _counter("kvobs.alloc.operations", "{operation}", ("device", "operation"),
             "Calls of the memory allocator: allocate, free, or untracked (an allocation whose free cannot be seen).",
             "count; allocate - free = alive"),
    _counter("kvobs.alloc.io", "By", ("device", "operation"),
             "Bytes that the memory allocator gave and took back: allocate or free, without the untracked.",
             "usable size of each block; allocate - free = alive"),
    _counter("kvobs.alloc.slow", "{allocation}", ("device",), "Timed allocations that took longer than 12 ms.",
             "count of timed latencies above 0.012 s"),
    _gauge("kvobs.alloc.interval", "{allocation}", ("device",),
           "One of this many requests to the memory allocator is timed, on average.", "setting of the native counter",
           across_ranks="max"),
    _gauge("kvobs.allocator.usage", "By", ("device", "state"),
           "Device memory an allocator reserved: allocated, or unused (cached by the allocator).",
           "unused = reserved - allocated"),
    _gauge("kvobs.window.fragmentation", "1", ("device",),
           "Largest share of reserved allocator memory that was unused in the sliding window" + _WINDOW,
           "max of (reserved - allocated) / reserved", across_ranks="max"),
    _gauge("kvobs.window.largest_free", "By", ("device",),
           "Smallest of the largest free blocks seen in the sliding window" + _WINDOW, "min of largest free block",
           across_ranks="min"),
    _gauge("kvobs.window.allocation.variance", "s2", ("device",),
           "Variance of allocation latency in the sliding window" + _WINDOW, "population variance", across_ranks="max",
           nature="measured"),
    _gauge("kvobs.window.step.mean", "s", ("model", "device"), "Mean step duration in the sliding window" + _WINDOW,
           "mean", across_ranks="max", nature="measured"),
    _gauge("kvobs.window.step.variance", "s2", ("model", "device"),
           "Variance of step duration in the sliding window" + _WINDOW, "population variance", across_ranks="max",
           nature="measured"),
    _counter("kvobs.attention.queries", "{query}", _LAYERS, "Query heads that sampled decode steps looked at.",
             "query heads x rows x layers, less those that saw only attention sinks", "measured"),
    _counter("kvobs.attention.local", "1", _LAYERS,
             "Sum over sampled query heads of the share of attention mass within 64 tokens; divide by the queries.",
             "sum of a_ij over i - j <= 64 / sum of a_ij, the first 4 tokens (attention sinks) left out", "measured"),
    _counter("kvobs.attention.chance", "1", _LAYERS,
             "What kvobs.attention.local would be if attention were uniform: the chance line.",
             "keys within 64 tokens / keys in view, the first 4 left out; summed over query heads", "measured"),
    _counter("kvobs.attention.entries", "{entry}", (*_LAYERS, "state"),
             "K/V entries in view of sampled decode steps, by the article's cosine rule (S4): alive or dead.",
             "alive: a query head that reads the key has a cosine above 0.15 with it", "measured"),
    _counter("kvobs.attention.transitions", "{transition}", (*_LAYERS, "to"),
             "Blocks of 16 tokens (per row and layer) that changed state in sampled decode steps.",
             "to pending: largest score below 0.08 in 3 consecutive steps; to active: a score of 0.08 or more",
             "measured"),
    _gauge("kvobs.attention.blocks", "{block}", (*_LAYERS, "state"),
           "Blocks of 16 tokens (per row and layer) by the article's life cycle: active or pending (evict).",
           "as of each live cache's last sampled step", nature="measured"),
    _gauge("kvobs.attention.reclaimable", "By", _LAYERS,
           "KV bytes in blocks that are Pending Evict: what eviction by the article's rule would free.",
           "tokens in pending blocks x bytes per token and layer", nature="measured"),
    _gauge("kvobs.attention.interval", "{step}", ("model",),
           "One of this many decode steps is sampled, chosen so that sampling stays inside the overhead.",
           "sampling cost / its share of the overhead", across_ranks="max"),
    _histogram("kvobs.kv.update.duration", "s", _LAYERS, LATENCY_BUCKETS,
               "Host time of Cache.update per layer in sampled passes.", "end - start of the call"),
    _gauge("kvobs.allocator.requested", "By", ("device",), "Bytes that live allocations asked for, before rounding.",
           "the allocator's requested_bytes"),
    _gauge("kvobs.allocator.active", "By", ("device",),
           "Bytes in use, or freed but waiting for a stream that still uses them.", "the allocator's active_bytes"),
    _gauge("kvobs.allocator.inactive_split", "By", ("device",),
           "Free bytes in segments that live blocks keep from being released; absent with expandable segments.",
           "the allocator's inactive_split_bytes"),
    _gauge("kvobs.allocator.segments", "{segment}", ("device",), "Segments that the allocator holds of the device.",
           "the allocator's segment count"),
    _counter("kvobs.allocator.retries", "{retry}", ("device",),
             "Allocations that failed at first, so that cached segments had to be released.", "num_alloc_retries"),
    _counter("kvobs.allocator.out_of_memory", "{error}", ("device",), "Allocations that failed for good.", "num_ooms"),
    _counter("kvobs.allocator.device.operations", "{operation}", ("device", "operation"),
             "Calls for device memory: allocate or free.", "num_device_alloc, num_device_free"),
    _gauge("kvobs.allocator.setting", "{setting}", ("setting", "value"),
           "The allocator settings in effect, one point per setting.", "1", across_ranks="max"),
    _gauge("kvobs.heap.usage", "By", ("state",),
           "The C heap of this process: used (thread caches included), free, or mapped (large blocks of their own).",
           "mallinfo2: uordblks, fordblks, hblkhd"),
    _gauge("kvobs.heap.trimmable", "By", (), "Free bytes at the top of the heap that malloc_trim gives back.",
           "mallinfo2: keepcost"),
    _gauge("kvobs.device.memory", "By", ("device", "part"),
           "Device memory by owner at one instant: torch, context (CUDA, NCCL), others (processes), unexplained, free.",
           "context = this process - torch reserved; unexplained = total - free - all processes", across_ranks="max"),
    _gauge("hw.gpu.memory.usage", "By", _GPU, "GPU memory in use, with what the driver reserves for itself.",
           "NVML memory: total - free", across_ranks="max"),
    _gauge("hw.gpu.memory.limit", "By", _GPU, "GPU memory there is, by the driver.", "NVML memory: total",
           across_ranks="max"),
    _gauge("hw.gpu.memory.utilization", "1", _GPU, "Share of GPU memory in use.", "(total - free) / total",
           across_ranks="max", nature="measured"),
    _gauge("hw.gpu.utilization", "1", _GPU, "Share of the driver's last sample period in which a kernel ran.",
           "NVML utilization rate / 100", across_ranks="max", nature="measured"),
    _gauge("hw.power", "W", _HARDWARE, "Power that the GPU draws.", "NVML power usage / 1000", across_ranks="max",
           nature="measured"),
    _counter("hw.energy", "J", _HARDWARE, "Energy that the GPU used since the driver was loaded.",
             "NVML total energy consumption / 1000", "measured", across_ranks="max"),
    _gauge("hw.temperature", "Cel", _GPU, "Temperature of the GPU.", "NVML temperature", across_ranks="max",
           nature="measured"),
    _gauge("process.memory.usage", "By", (), "Resident memory of this process.", "/proc/self/statm: resident pages"),
    _gauge("process.memory.virtual", "By", (), "Address space of this process.", "/proc/self/statm: size"),
    _gauge("process.thread.count", "{thread}", (), "Threads of this process.", "/proc/self/stat: num_threads"),
    _counter("process.cpu.time", "s", ("cpu.mode",), "CPU time of this process: user or system.",
             "/proc/self/stat: utime, stime"),
    _counter("process.paging.faults", "{fault}", ("system.paging.fault.type",),
             "Page faults of this process: minor, or major (from disk).", "/proc/self/stat: minflt, majflt"),
    _counter("process.context_switches", "{context_switch}", ("process.context_switch.type",),
             "Context switches of this process, all threads: voluntary or involuntary.",
             "getrusage: ru_nvcsw, ru_nivcsw"),
    _gauge("system.memory.limit", "By", (), "Memory of this machine.", "/proc/meminfo: MemTotal", across_ranks="max"),
    _gauge("system.memory.usage", "By", ("system.memory.state",),
           "Memory of this machine by state: used, free, buffers or cached.",
           "/proc/meminfo: used = total - free - buffers - cached", across_ranks="max"),
    _gauge("kvobs.host.hugepages", "{page}", ("size", "state"),
           "Huge pages of this machine by size: total, free, reserved or surplus; up to 10 s old.",
           "/sys/kernel/mm/hugepages", across_ranks="max"),
    _gauge("kvobs.host.thp", "By", ("mode",),
           "Memory of this process in transparent huge pages, by the machine's mode; up to 60 s old.",
           "/proc/self/smaps_rollup: AnonHugePages"),
    _gauge("kvobs.host.numa.usage", "By", ("node", "state"), "Memory of each NUMA node: used or free; up to 10 s old.",
           "/sys/devices/system/node/*/meminfo", across_ranks="max"),
    _counter("kvobs.host.numa.allocations", "{page}", ("node", "kind"),
             "Pages each NUMA node gave: hit, miss, foreign, interleave, local or other; up to 10 s old.",
             "/sys/devices/system/node/*/numastat", across_ranks="max"),
    _counter("kvobs.host.pressure", "s", ("resource", "kind"),
             "Time in which some or all (full) tasks waited for cpu, memory or io.", "/proc/pressure: total",
             across_ranks="max"),
    _gauge("kvobs.host.cgroup.memory", "By", ("state",),
           "Memory of this process's control group: usage, peak, limit (the smallest of its own and those above).",
           "memory.current, memory.peak, memory.max; v1: usage, max_usage, limit", across_ranks="max"),
    _counter("kvobs.host.cgroup.events", "{event}", ("event",),
             "Memory events of this process's control group: low, high, max, oom, oom_kill; v1 has max and oom_kill.",
             "memory.events; v1: failcnt, oom_control", across_ranks="max"),
    _counter("kvobs.flight.records", "{record}", ("reason",), "Flight records that were taken.", "count"),
    _counter("kvobs.self.events", "{event}", (), "Events the drain thread interpreted.", "count"),
    _counter("kvobs.self.events.dropped", "{event}", ("stage",),
             "Telemetry lost: the host was spared, the data was not.", "count by stage: queue, store, otlp"),
    _counter("kvobs.self.hook.duration", "s", ("source",),
             "Time kvobs spent on the engine's threads by its own clock, which misses about an eighth.",
             "sum of the hooks' own timing", nature="measured"),
    _counter("kvobs.self.hook.failures", "{failure}", ("source",), "Hooks that raised and were detached.", "count"),
    _counter("kvobs.self.fold.duration", "s", (), "Time the drain thread spent interpreting events.", "sum",
             nature="measured"),
    _counter("kvobs.self.window.duration", "s", (), "Time spent keeping and reading the sliding windows.", "sum",
             nature="measured"),
    _counter("kvobs.self.drain.duration", "s", (), "CPU time of the drain thread.", "thread clock", nature="measured"),
    _counter("kvobs.self.poll.duration", "s", ("source",), "Time a polled source took to read.", "sum",
             nature="measured"),
    _gauge("kvobs.self.overhead", "1", (),
           "Share of the engine's time that the hooks took in the last 3 s; absent while there are no steps.",
           "hooks / (hooks + forward passes)", across_ranks="max", nature="measured"),
    _gauge("kvobs.self.throttle", "{level}", (),
           "What the overhead guard does: 0 nothing, 1 no deep sampling, 2 everything passes through unobserved.",
           "0, 1 or 2", across_ranks="max"),
    _counter("kvobs.self.paused", "s", (), "Time in which everything passed through unobserved.", "sum",
             nature="measured"),
    _counter("kvobs.self.turns.cut", "{turn}", (), "Turns that are not told because observation paused within them.",
             "count"),
    _counter("kvobs.self.series.overflow", "{point}", ("metric",),
             "Points folded into 'other' because a metric had too many attribute sets.", "count"),
    _gauge("kvobs.self.store.size", "By", (), "Bytes of this process's store, write-ahead log included.",
           "file sizes"),
    _gauge("kvobs.availability", "{subject}", ("subject", "reason"),
           "1 for what can be observed here, 0 with a reason for what cannot.", "probe", across_ranks="max"),
)

BY_NAME: dict[str, Row] = {row.name: row for row in ROWS}
if len(BY_NAME) != len(ROWS):
    raise RuntimeError("The catalog says a name twice.")

_PROMETHEUS_UNITS = {"s": "seconds", "By": "bytes", "W": "watts", "J": "joules", "Cel": "celsius"}


def prometheus_name(row: Row) -> str:
    """The metric family's Prometheus name, as OpenTelemetry's translation rules give it.

    Source: the OpenTelemetry specification, "Prometheus and OpenMetrics compatibility": dots become
    underscores, units are spelled out, a unitless gauge ends ``_ratio``, a counter ``_total``.
    """
    name = row.name.replace(".", "_")
    unit = "" if row.unit.startswith("{") else _PROMETHEUS_UNITS.get(row.unit, row.unit)
    if unit == "1":
        unit = "ratio" if row.kind == "gauge" else ""
    if unit and not name.endswith("_" + unit):
        name += "_" + unit
    return name + "_total" if row.kind == "counter" and not name.endswith("_total") else name


def prometheus_label(attribute: str) -> str:
    """The Prometheus label of an attribute key."""
    return attribute.replace(".", "_")


def markdown() -> str:
    """The generated metric table of the README and METRICS pages."""
    lines = [
        "| OpenTelemetry name | Prometheus name | kind | unit | attributes | across ranks | nature | meaning "
        "| formula |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{row.name}` | `{prometheus_name(row)}` | {row.kind} | `{row.unit}` | "
        f"{', '.join(f'`{a}`' for a in row.attributes) or '-'} | {row.across_ranks} | {row.nature} | "
        f"{row.meaning} | {row.formula} |"
        for row in ROWS
    ]
    return "\n".join(lines) + "\n"
