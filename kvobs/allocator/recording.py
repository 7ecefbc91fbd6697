"""What a file tells about an allocator, in compact columns. The readers make it, everything else reads it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from kvobs.allocator.settings import Settings
from kvobs.allocator.state import State

# Values of Events.action; the names are those of torch.cuda.memory._snapshot.
ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
           "segment_unmap", "snapshot", "oom", "other")
(ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP,
 SEGMENT_UNMAP, SNAPSHOT, OOM, OTHER) = range(len(ACTIONS))
# Calls that take memory from the device, and that give it back.
TAKEN, GIVEN_BACK = frozenset({SEGMENT_ALLOC, SEGMENT_MAP}), frozenset({SEGMENT_FREE, SEGMENT_UNMAP})
UNKNOWN = -1


@dataclass(slots=True)
class Events:
    """One device's history, oldest first; columns of equal length.

    ``address``: of the block or segment; for an OOM the bytes the device had free. ``size``: bytes (requested bytes for
    alloc, free and OOM). ``time_us``: since the epoch, UNKNOWN where the file has none. ``stack``: index into
    ``Stacks.stacks``, or UNKNOWN. ``pool``: index into ``Recording.pools``, or UNKNOWN.
    """

    action: array[int] = field(default_factory=lambda: array("B"))
    address: array[int] = field(default_factory=lambda: array("Q"))
    size: array[int] = field(default_factory=lambda: array("q"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    time_us: array[int] = field(default_factory=lambda: array("q"))
    stack: array[int] = field(default_factory=lambda: array("i"))
    pool: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True, slots=True)
class Stacks:
    """Every distinct stack once. A frame is (file name, line, function); a stack lists frames, innermost first."""

    frames: tuple[tuple[str, int, str], ...] = ()
    stacks: tuple[tuple[int, ...], ...] = ()

    def of(self, stack: int) -> tuple[tuple[str, int, str], ...]:
        """The frames of one stack; none for UNKNOWN."""
        return tuple(self.frames[frame] for frame in self.stacks[stack]) if stack >= 0 else ()


@dataclass(frozen=True, slots=True)
class Annotation:
    """A range or mark of the program (``record_function``, optimizer steps). ``stage`` is START or END."""

    name: str
    stage: str
    time_us: int


@dataclass(frozen=True, slots=True)
class DeviceRecording:
    """One device of a snapshot: its last state, and what led to it (possibly only the last part, or nothing)."""

    device: int
    state: State
    events: Events
    annotations: tuple[Annotation, ...] = ()


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that take or give back device memory (cudaMalloc, cudaFree, cuMemMap …), columns of equal length."""

    name: tuple[str, ...] = ()
    start_ns: array[int] = field(default_factory=lambda: array("q"))
    duration_ns: array[int] = field(default_factory=lambda: array("q"))


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory in use over time as a profiler saw it; columns of equal length, bytes. UNKNOWN where it did not say."""

    device: str
    time_us: array[int]
    allocated: array[int]
    reserved: array[int]
    categories: dict[str, array[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything kvobs could read from one file.

    ``schema`` names the kind and age of the file in words, for instance ``torch snapshot (2023)``. ``settings`` is None
    where the file does not tell them. ``pools`` are the allocator's pool ids; 0 is the default pool (0, 0).
    ``notes`` are whole sentences about what is missing or contradicts itself. ``calls`` and ``usage`` come from
    profilers, whose files have no ``devices``.
    """

    file: str
    schema: str
    settings: Settings | None = None
    devices: tuple[DeviceRecording, ...] = ()
    pools: tuple[tuple[int, int], ...] = ((0, 0),)
    stacks: Stacks = Stacks()
    calls: Calls = Calls()
    usage: tuple[Usage, ...] = ()
    notes: tuple[str, ...] = ()
