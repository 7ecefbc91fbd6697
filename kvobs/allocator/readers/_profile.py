"""What the readers of profiler files share: columns of calls, and what is to be said about them."""

from __future__ import annotations

from array import array

from kvobs.allocator.recording import Calls

_MUCH = 10
_MOST_NOTES = 8


def calls_of(rows: list[tuple[int, int, str, int | str]]) -> tuple[Calls, tuple[str, ...]]:
    """Calls in order of their start, from (start ns, duration ns, name, process), and sentences about them."""
    rows.sort(key=lambda row: row[0])
    calls = Calls(tuple(name for _, _, name, _ in rows), array("q", (row[0] for row in rows)),
                  array("q", (row[1] for row in rows)))
    first: dict[int | str, int] = {}
    for index, (*_, process) in enumerate(rows):
        first.setdefault(process, index)
    median = sorted(calls.duration_ns)[(len(rows) - 1) // 2] if rows else 0
    slow = [rows[index] for index in first.values() if rows[index][1] > _MUCH * median]
    return calls, tuple(f"The first call for device memory of process {str(process)[:32]!r}, {name}, took "
                        f"{duration / 1e6:.1f} ms, much longer than most: it will have created the device's context."
                        for _, duration, name, process in slow[:_MOST_NOTES])
