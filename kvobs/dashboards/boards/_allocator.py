"""The allocator: how slow it is, what it holds, how much of that is fragments, and where the device's memory is."""

from __future__ import annotations

from kvobs.catalog import SLOW_ALLOCATION
from kvobs.dashboards._model import Board, Section
from kvobs.dashboards._panels import heat, lines, query, stat, table, unreachable
from kvobs.dashboards._promql import (
    buckets,
    deviation,
    less,
    quantile,
    rate,
    state,
    top,
    within,
    worst,
)
from kvobs.dashboards.boards._host import HEAP, HOST, NVIDIA
from kvobs.dashboards.boards._shared import (
    ACCELERATORS,
    NO_ALLOCATOR,
    NO_NVML,
    NO_PROBE,
    NO_WINDOW,
    allocation_quantiles,
    unused_share,
)
from kvobs.dashboards.boards._waterfall import waterfall

STRIP = (
    unreachable(),
    stat("Latency, p95", "Do 95 % of allocations stay within the objective's 12 ms?",
         quantile(0.95, "kvobs.alloc.latency"), absent=NO_PROBE,
         steps=((None, "green"), (SLOW_ALLOCATION, "red"))),
    stat("Within 12 ms", "Which share of allocations is fast enough?", within(SLOW_ALLOCATION, "kvobs.alloc.latency"),
         absent=NO_PROBE),
    stat("Allocated", "How much device memory do live tensors take?",
         state("kvobs.allocator.usage", state="allocated", device=ACCELERATORS),
         absent=NO_ALLOCATOR),
    stat("Reserved, unused", "How much does the allocator hold that serves nobody?",
         state("kvobs.allocator.usage", state="unused", device=ACCELERATORS), absent=NO_ALLOCATOR),
    stat("Worst unused", "Which share of reserved memory serves nobody, at the worst process and device?",
         worst(unused_share()), absent=NO_ALLOCATOR, steps=((None, "green"), (0.3, "orange"), (0.5, "red"))),
    stat("Least largest free", "How large a request can be served from what is reserved?",
         state("kvobs.window.largest_free", device=ACCELERATORS), absent=NO_WINDOW),
    stat("Unexplained", "How much of a device's memory does nobody explain, at most?",
         state("kvobs.device.memory", part="unexplained"), absent=NO_NVML),
)

SYMPTOM = Section("Symptom: allocations are slow or fail", (
    heat("Allocation latency by bucket", "How are latencies spread, and which ones are beyond the objective's 12 ms?",
         buckets("kvobs.alloc.latency"), line_at=SLOW_ALLOCATION, line_name="12 ms = objective", absent=NO_PROBE,
         note="The row named '12 ms = objective' ends at the objective's line: all above it is slow. "
         "Latencies carry no trace: *Time to first token* on Requests & turns does."),
    lines("Allocation latency", "Do allocations stay within the objective's 12 ms?",
          *allocation_quantiles(0.5, 0.95, 0.99),
          absent=NO_PROBE, limit=SLOW_ALLOCATION, width=12, height=9),
    lines("Slow allocations", "How many timed allocations took longer than 12 ms?", rate("kvobs.alloc.slow", "device"),
          absent=NO_PROBE),
    lines("Retries and failures", "Does the allocator have to release cached segments, or give up?",
          query(rate("kvobs.allocator.retries", "device"), "retries on"),
          query(rate("kvobs.allocator.out_of_memory", "device"), "out of memory on"), absent=NO_ALLOCATOR),
    lines("Spread of latency in the window", "Is the allocator's latency steady?",
          query(deviation(state("kvobs.window.allocation.variance", "device"))),
          absent="not told: latencies come as counts"),
))

PRESSURE = Section("Pressure: what takes the device's memory", (
    waterfall(),
    lines("Reserved memory by state", "How much do live tensors take, and how much is cached by the allocator?",
          state("kvobs.allocator.usage", "device", "state", device=ACCELERATORS), stacked=True,
          absent=NO_ALLOCATOR, width=12),
    lines("Device memory by owner", "Who holds the device's memory?",
          state("kvobs.device.memory", "instance", "device", "part"), absent=NO_NVML, width=12,
          note="Not stacked: each process tells of the whole device, so processes that share one say the same of "
          "it, but for what is their own."),
))

FRAGMENTATION = Section("Fragmentation: free memory that cannot serve", (
    lines("Unused share, worst ten", "Which processes reserve much more than they use?", top(10, unused_share()),
          high=1, absent=NO_ALLOCATOR),
    lines("Worst share in the window", "How bad did it get between two scrapes?",
          state("kvobs.window.fragmentation", "device"), high=1, absent=NO_WINDOW),
    lines("Smallest largest free block", "How large a request can still be served?",
          state("kvobs.window.largest_free", "device"), absent=NO_WINDOW),
    lines("Free in split segments", "How much free memory do live blocks keep from being released?",
          state("kvobs.allocator.inactive_split", "device"), absent="expandable segments, or no allocator"),
    lines("Lost to rounding", "How much do live tensors take beyond what they asked for?",
          less(state("kvobs.allocator.usage", "device", state="allocated"),
               state("kvobs.allocator.requested", "device")), absent=NO_ALLOCATOR, low=None),
    lines("Waiting for a stream", "How much freed memory does a stream still use?",
          less(state("kvobs.allocator.active", "device"),
               state("kvobs.allocator.usage", "device", state="allocated")), absent=NO_ALLOCATOR, low=None),
))

REALLOCATION = Section("Re-allocation: how busy the allocator is", (
    lines("Calls of the allocator", "How often is memory asked for and given back?",
          rate("kvobs.alloc.operations", "device", "operation"), absent="no probe"),
    lines("Bytes given and taken back", "How much memory goes round?", rate("kvobs.alloc.io", "device", "operation"),
          absent="no probe"),
    lines("Calls for device memory", "Does the allocator have to go to the device?",
          rate("kvobs.allocator.device.operations", "device", "operation"), absent=NO_ALLOCATOR),
    lines("Segments", "In how many pieces is reserved memory?", state("kvobs.allocator.segments", "device"),
          absent=NO_ALLOCATOR),
    table("Allocator settings in effect", "Which settings explain what is seen here?",
          query(state("kvobs.allocator.setting", "instance", "setting", "value"), "In effect"), absent=NO_ALLOCATOR,
          width=8, height=7),
    lines("Sampling of latencies", "How rarely is a request timed?",
          query(state("kvobs.alloc.interval", "device"), "one in, on"), absent=NO_PROBE),
))

BOARD = Board(
    slug="allocator", title="Allocator & fragmentation",
    description="How slow allocations are, what takes the device's memory, and how much of it is fragments.",
    strip=STRIP, sections=(SYMPTOM, PRESSURE, FRAGMENTATION, REALLOCATION, HEAP, NVIDIA, HOST))

