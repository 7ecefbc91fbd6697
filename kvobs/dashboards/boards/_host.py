"""What is below the allocator: the C heap, the GPU by its driver, the machine."""

from __future__ import annotations

from kvobs.dashboards._model import Section
from kvobs.dashboards._panels import lines, query
from kvobs.dashboards._promql import rate, state
from kvobs.dashboards.boards._shared import NO_NVML

NO_HEAP = "no glibc heap"
NO_LINUX = "not told here"

HEAP = Section("CPU memory: the C heap and this process", (
    lines("C heap by state", "Does the heap keep memory that nobody uses?",
          state("kvobs.heap.usage", "instance", "state"), stacked=True, absent=NO_HEAP),
    lines("Heap that a trim would give back", "Would malloc_trim help?", state("kvobs.heap.trimmable", "instance"),
          absent=NO_HEAP),
    lines("Memory of the processes", "How large are the processes?",
          query(state("process.memory.usage", "instance"), "resident:"), absent=NO_LINUX),
), collapsed=True)

NVIDIA = Section("kvobs[nvml]: the GPU as its driver sees it", (
    lines("GPU memory", "How full is each GPU?", query(state("hw.gpu.memory.usage", "hw_id", "hw_name"), "used:"),
          query(state("hw.gpu.memory.limit", "hw_id", "hw_name"), "there is:"), absent=NO_NVML),
    lines("Share of GPU memory in use", "Which GPU is about to be full?",
          state("hw.gpu.memory.utilization", "hw_id", "hw_name"), high=1, absent=NO_NVML),
    lines("GPU busy", "Does the GPU work, or does it wait?", state("hw.gpu.utilization", "hw_id", "hw_name"), high=1,
          absent=NO_NVML),
    lines("Power", "How much power do the GPUs draw, by the sensor and by the energy counter?",
          query(state("hw.power", "hw_id", "hw_name"), "sensor:"),
          query(rate("hw.energy", "hw_id", "hw_name"), "counter:"), absent=NO_NVML, width=12),
    lines("Temperature", "Is a GPU so warm that it slows down?", state("hw.temperature", "hw_id", "hw_name"),
          absent=NO_NVML, width=12, low=None),
), collapsed=True)

HOST = Section("Linux: machine, NUMA nodes and control group", (
    lines("Memory of the machine", "Is the machine short of memory?",
          query(state("system.memory.usage", "instance", "system_memory_state"), "in use as"),
          query(state("system.memory.limit", "instance"), "there is:"), absent=NO_LINUX),
    lines("Control group", "Is the process about to meet its limit?",
          state("kvobs.host.cgroup.memory", "instance", "state"), absent="no control group"),
    lines("Memory events of the control group", "Was the process throttled or killed for memory?",
          rate("kvobs.host.cgroup.events", "instance", "event"), absent="no control group"),
    lines("Pressure", "Which share of the time do tasks wait for a resource?",
          rate("kvobs.host.pressure", "instance", "resource", "kind"), absent="no pressure information"),
    lines("CPU time", "How busy are the processes?", rate("process.cpu.time", "instance", "cpu_mode"), unit="none",
          absent=NO_LINUX, note="1 is one core, fully used."),
    lines("Page faults", "Does memory come from disk?",
          rate("process.paging.faults", "instance", "system_paging_fault_type"), absent=NO_LINUX),
    lines("Context switches", "Do threads wait, or are they pushed aside?",
          rate("process.context_switches", "instance", "process_context_switch_type"), absent=NO_LINUX),
    lines("NUMA memory", "Is one node full while another is not?",
          state("kvobs.host.numa.usage", "instance", "node", "state"), absent="no NUMA information"),
    lines("NUMA allocations", "Does memory come from the wrong node?",
          rate("kvobs.host.numa.allocations", "instance", "node", "kind"), absent="no NUMA information"),
    lines("Huge pages", "Are there huge pages left?", state("kvobs.host.hugepages", "instance", "size", "state"),
          absent="none configured"),
    lines("Transparent huge pages", "How much of the process is in huge pages?",
          state("kvobs.host.thp", "instance", "mode"), absent=NO_LINUX),
), collapsed=True)
