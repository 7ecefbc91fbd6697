"""Who holds memory: by the frames that allocated it, and by kind (estimated from the frames, see ``kinds``)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvobs.allocator.kinds import CUBLAS_WORKSPACE, KINDS, Frame, Kinds
from kvobs.allocator.recording import Stacks
from kvobs.allocator.state import ALLOCATED, State

SHOWN = 20
# Not the user's: installed packages, the standard library, torch's own files, what is written in C or C++, and the
# files that Inductor generates (named by a hash).
_NOT_THE_USERS = re.compile(
    r"(?:site|dist)-packages[/\\]|(?:^|[/\\])lib[/\\]python\d|^python[/\\]|^(?:torch|_?inductor|einops)[/\\]"
    r"|torchinductor|(?:^|[/\\])c[a-z0-9]{49,}\.py$")


class Place(NamedTuple):
    """What allocations of one holder share: a kind, the rule and the frame that decided it, and the first frame of the
    user's own code.

    ``frame`` is the deciding frame, or where no rule knew one the user's, or the innermost; ``user_frame`` is None
    where all frames belong to libraries.
    """

    kind: str
    rule: str
    frame: Frame | None
    user_frame: Frame | None

    @property
    def label(self) -> str:
        """The frame as people read it; for a library's also where the user's code is."""
        if self.frame is None:
            return self.rule
        own = f" (from {frame_text(self.user_frame)})" if self.user_frame not in (None, self.frame) else ""
        return f"{frame_text(self.frame)}{own}"


@dataclass(frozen=True, slots=True)
class Holder:
    """The allocations of one place. ``share`` is of all bytes allocated."""

    place: Place
    size_bytes: int
    requested_bytes: int
    blocks: int
    share: float


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is allocated at one moment. ``top`` has the largest holders; with ``rest_bytes`` (of ``rest`` further ones)
    they sum to ``allocated_bytes``, and so do the kinds.
    """

    allocated_bytes: int
    top: tuple[Holder, ...]
    rest: int
    rest_bytes: int
    kinds: dict[str, int]


class Attribution:
    """Groups stacks of one recording; each stack is looked at once."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks, self._kinds = stacks, Kinds()
        self._decided: dict[tuple[int, bool], int] = {}
        self._numbers: dict[Place, int] = {}
        self.groups: list[Place] = []

    def group(self, stack: int, size: int) -> int:
        """The number of the group that an allocation belongs to; ``groups`` says what that is."""
        key = stack, size == CUBLAS_WORKSPACE
        found = self._decided.get(key)
        if found is None:
            found = self._decided[key] = self._number(stack, size)
        return found

    def _number(self, stack: int, size: int) -> int:
        frames = self._stacks.of(stack)
        decided = self._kinds.decide(frames, size)
        own = next((frame for frame in frames if users(frame)), None)
        shown = decided.frame or own or next((frame for frame in frames if frame[0].endswith(".py")), None) or (
            frames[0] if frames else None)
        key = Place(decided.kind, decided.rule, shown, own)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.groups)
            self.groups.append(key)
        return number


def users(frame: Frame) -> bool:
    """Whether a frame is of the user's own Python code rather than of a library."""
    return frame[0].endswith(".py") and _NOT_THE_USERS.search(frame[0]) is None


def frame_text(frame: Frame | None) -> str:
    """``cache_engine.py:83 _allocate_kv_cache``: the file without its folders."""
    if frame is None:
        return "no frame"
    file, line, function = frame
    name = re.split(r"[/\\]", file)[-1]
    place = f"{name}:{line} " if line > 0 else f"{name} " if name not in {"", "??"} else ""
    return f"{place}{function if file.endswith('.py') else _short(function)}"


def _short(function: str) -> str:
    """A C++ function without return type, template arguments and parameters."""
    made: list[str] = []
    depth = 0
    for letter in function.replace("(anonymous namespace)", "anonymous")[:2000]:
        depth -= letter in ">)"
        if letter == "(" and not depth and made:
            break
        depth += letter in "<("
        if not depth and letter not in ">)":
            made.append(letter)
    return "".join(made).strip().rpartition(" ")[2] or function[:120]


def holders(state: State, stacks: Stacks, limit: int = SHOWN, attribution: Attribution | None = None) -> Holdings:
    """Who holds the allocated blocks of a state, most bytes first."""
    found = attribution or Attribution(stacks)
    sums: dict[int, list[int]] = {}
    for segment in state:
        for block in segment.blocks:
            if block.state == ALLOCATED:
                entry = sums.setdefault(found.group(block.stack, block.requested), [0, 0, 0])
                entry[0] += block.size
                entry[1] += block.requested
                entry[2] += 1
    rows = ((number, size, requested, blocks) for number, (size, requested, blocks) in sums.items())
    return holdings(found, rows, limit)


def holdings(found: Attribution, sums: Iterable[tuple[int, int, int, int]], limit: int = SHOWN) -> Holdings:
    """Sums per group (number, bytes, requested bytes, blocks) as holders, ordered by bytes, then by name."""
    rows = [row for row in sums if row[3]]
    total = sum(row[1] for row in rows)
    kinds = dict.fromkeys(KINDS, 0)
    for number, size, _, _ in rows:
        kinds[found.groups[number].kind] += size
    made = [Holder(found.groups[number], size, requested, blocks, size / total if total else 0.0)
            for number, size, requested, blocks in rows]
    made.sort(key=lambda one: (-one.size_bytes, one.place.kind, one.place.label, one.place.rule))
    return Holdings(total, tuple(made[:limit]), len(made[limit:]), sum(one.size_bytes for one in made[limit:]),
                    {kind: size for kind, size in kinds.items() if size})
