"""The memory timeline of PyTorch's profiler (``export_memory_timeline``): raw rows, or sizes by category over time.

Source of both forms: ``torch/profiler/_memory_profiler.py``, ``MemoryProfileTimeline``, of PyTorch 2.0 to 2.13.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

import msgspec

from kvobs.allocator.readers._limits import MAX_EVENTS, MAX_SIZE, Refused, count
from kvobs.allocator.recording import UNKNOWN, Recording, Usage

# In the order of torch's _CATEGORY_TO_COLORS, which numbers the categories of a file.
CATEGORIES = ("parameter", "optimizer_state", "input", "temporary", "activation", "gradient", "autograd_detail",
              "unknown")
_ACTIONS = (1, 2, 3, 4)  # preexisting, create, increment version, destroy
_LATEST = 1 << 62  # ns; the year 2116
_DEVICE = "unknown"
_NOTES = ("A memory timeline does not name its device.",
          "A memory timeline tells what tensors took by category, not what the allocator reserved.")
_Row = tuple[int, int, int, int]
_Plot = tuple[list[int], list[list[int]]]


def parse(data: bytes, name: str) -> Recording:
    """Read either form.

    Raises:
        Refused: with one sentence; the file is no such timeline, is cut off, or holds impossible values.
    """
    try:
        rows = msgspec.json.decode(data, type=list[_Row])
    except (msgspec.ValidationError, RecursionError):
        return _plot(data, name)
    except msgspec.DecodeError as error:
        raise Refused(f"This memory timeline is cut off or not valid JSON ({error}).") from None
    if not rows:
        raise Refused("This memory timeline holds no rows: nothing was allocated on its device, or it was exported "
                      "for another device.")
    return _raw(rows, name)


def _raw(rows: list[_Row], name: str) -> Recording:
    count(len(rows), MAX_EVENTS, "rows of a memory timeline")
    for number, (time, action, size, category) in enumerate(rows, 1):
        if action not in _ACTIONS or not 0 <= category < len(CATEGORIES) or abs(size) > MAX_SIZE \
                or abs(time) > _LATEST:
            raise Refused(f"Row {number} of this memory timeline is not of the form [time, action 1-4, bytes, "
                          "category 0-7] that torch writes, or one of its values is impossible.")
    first = min((time for time, *_ in rows if time > 0), default=UNKNOWN)
    times = array("q")
    columns = [array("q") for _ in CATEGORIES]
    running = [0] * len(CATEGORIES)
    for time, _, size, category in rows:
        # As torch rounds, so that the raw and the other export of one profile have the same points.
        moment = _microseconds(time if time > 0 else first)
        if not times or moment != times[-1]:
            times.append(moment)
            for column, value in zip(columns, running, strict=True):
                column.append(value)
        running[category] += size
        if abs(running[category]) > MAX_SIZE:
            raise Refused("The sizes in this memory timeline add up to more bytes than any device has.")
        columns[category][-1] = running[category]
    before = sum(1 for time, action, *_ in rows if action == 1 or time <= 0)
    notes = (*_NOTES, f"{before} of {len(rows)} rows are memory from before the profile began; they are shown at its "
                      "first moment.") if before else _NOTES
    return _recording(name, "torch profiler memory timeline (raw)", times, columns, notes)


def _plot(data: bytes, name: str) -> Recording:
    try:
        times, sizes = msgspec.json.decode(data, type=_Plot)
    except (msgspec.DecodeError, RecursionError):
        raise Refused("This is no memory timeline: neither rows of [time, action, bytes, category] nor [times, "
                      "sizes by category].") from None
    width = len(CATEGORIES) + 1  # torch puts a column of zeros before them, for its stacked plot
    if len(times) != len(sizes) or any(len(row) != width for row in sizes):
        raise Refused(f"This memory timeline does not have {width} sizes for each of its {len(times)} times.")
    if not times:
        raise Refused("This memory timeline holds no points: nothing was allocated on its device, or it was "
                      "exported for another device.")
    if max(map(abs, times)) > _LATEST or any(abs(value) > MAX_SIZE for row in sizes for value in row):
        raise Refused("A number in this memory timeline is larger than any time or size.")
    columns = [array("q", (row[index] for row in sizes)) for index in range(1, width)]
    return _recording(name, "torch profiler memory timeline (plot points)", array("q", times), columns, _NOTES)


def _recording(name: str, schema: str, times: array[int], columns: list[array[int]],
               notes: tuple[str, ...]) -> Recording:
    allocated = array("q", map(sum, zip(*columns, strict=True)))
    below = sum(value < 0 for value in allocated)
    if below:
        notes += (f"At {below} of {len(times)} points more was freed than this file says was allocated.",)
    if any(later < earlier for earlier, later in pairwise(times)):
        notes += ("The times of this memory timeline are not in order.",)
    return Recording(name, schema, notes=notes, usage=(Usage(
        _DEVICE, times, allocated, array("q", [UNKNOWN]) * len(times),
        dict(zip(CATEGORIES, columns, strict=True))),))


def _microseconds(time: int) -> int:
    return int(time / 1000) if time > 0 else UNKNOWN
