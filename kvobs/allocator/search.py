"""The best supported settings for a demand, by trying them all. *Modelled*, like everything about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvobs.allocator.chains import IsKV
from kvobs.allocator.demand import RecordedDemand
from kvobs.allocator.growth import Growth
from kvobs.allocator.recording import Recording
from kvobs.allocator.replayed import Replay
from kvobs.allocator.settings import INTERVALS, MIB, NO_DIVISIONS, Settings
from kvobs.allocator.whatif import AS_RECORDED, Case, Comparison, Figures, asked, changed, compare, figures

SPLITS_MIB = (32, 64, 128, 256, 512)
DIVISIONS = (2, 4, 8, 16)  # 1 is the same as none
THRESHOLDS = (0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings and what the model gave for them."""

    settings: Settings
    figures: Figures

    @property
    def rank(self) -> tuple[int, int, int]:
        """What is compared, the smaller the better: OOMs, peak reserved bytes, estimated ns in device calls."""
        known = [estimate.ns for estimate in self.figures.call_time if estimate.ns is not None]
        return self.figures.ooms, self.figures.peak_reserved_bytes, sum(known)


@dataclass(frozen=True, slots=True)
class Found:
    """``ranking``: best first; of equals the one with fewer changes. ``best`` is what the search began with unless
    others are better. ``sentence`` says what they gain, or that nothing does. ``line`` is to be put into the
    environment; it is empty where nothing should be changed.
    """

    ranking: tuple[Candidate, ...]
    before: Candidate
    best: Candidate
    sentence: str
    line: str


def search(case: Case, demand: RecordedDemand, growth: str, engine: str = "auto",
           progress: Callable[[int, int], None] | None = None) -> Found:
    """Run a demand under every candidate. ``progress`` is told how many are done and how many there are."""
    settings = list(candidates(case.settings, case.limit is not None))
    tried = []
    for index, one in enumerate(settings):
        if progress is not None:
            progress(index, len(settings))
        tried.append(Candidate(one, figures(case, demand, one, case.limit, growth, engine, judged=0)))
    if progress is not None:
        progress(len(settings), len(settings))
    before = tried[0]
    ranking = tuple(sorted(tried, key=lambda one: one.rank))  # stable: the earlier wins a tie
    best = ranking[0]
    return Found(ranking, before, best, _sentence(before, best),
                 "" if best is before else f"PYTORCH_ALLOC_CONF={best.figures.settings}")


def compare_best(case: Case, recording: Recording, changes: Mapping[str, str], growth: Growth | None = None, *,
                 replay: Replay | None = None, engine: str = "auto", is_kv: IsKV | None = None,
                 progress: Callable[[int, int], None] | None = None) -> tuple[Comparison, Found]:
    """Compare what was recorded with the best settings; the search starts from the changes that are given.

    Raises:
        ValueError: a change that is not possible, or a KV cache that cannot be made to grow otherwise.
    """
    demand, _ = asked(case, recording, growth, is_kv)
    found = search(replace(case, settings=changed(case.settings, changes)), demand,
                   AS_RECORDED if growth is None else str(growth), engine, progress)
    return compare(case, recording, changes, growth, settings=found.best.settings, replay=replay, engine=engine,
                   is_kv=is_kv), found


def candidates(base: Settings, limited: bool) -> Iterator[Settings]:
    """The settings in force first, then others, by how many options they change.

    ``max_split_size_mb`` and ``garbage_collection_threshold`` are left alone with expandable segments, whose blocks
    are split and returned page by page; the threshold is tried only where a memory fraction of a known capacity
    (``limited``) makes it act.
    """
    splits = [None, *(size * MIB for size in SPLITS_MIB if size * MIB >= base.large_segment_size)]
    divisions = [NO_DIVISIONS, *((each,) * INTERVALS for each in DIVISIONS)]
    thresholds = [0.0, *THRESHOLDS] if limited and base.memory_fraction is not None else [0.0]
    grid = {replace(base, expandable_segments=False, max_split_size=split, roundup_power2_divisions=division,
                    garbage_collection_threshold=threshold): None
            for split in splits for division in divisions for threshold in thresholds}
    grid |= {replace(base, expandable_segments=True, max_split_size=None, roundup_power2_divisions=division,
                     garbage_collection_threshold=0.0): None for division in divisions}
    grid.pop(base, None)
    yield base
    yield from sorted(grid, key=lambda one: _changes(base, one))


def _changes(base: Settings, other: Settings) -> int:
    names = ("expandable_segments", "max_split_size", "roundup_power2_divisions", "garbage_collection_threshold")
    return sum(getattr(base, name) != getattr(other, name) for name in names)


def _saved_ns(before: Candidate, best: Candidate) -> list[int]:
    """By each source of costs that tells about both."""
    old, new = ({one.source: one.ns for one in each.figures.call_time if one.ns is not None} for each in (before, best))
    return [old[source] - new[source] for source in old if source in new]


def _not_counted(before: Candidate, best: Candidate) -> str:
    """The operations whose time no source of costs tells."""
    names = {name for each in (before, best) for one in each.figures.call_time for name in one.missing}
    return f", without {' and '.join(sorted(names))}" if names else ""


def _sentence(before: Candidate, best: Candidate) -> str:
    if best is before:
        return "None of the settings that were tried is better than those the search began with (modelled)."
    words = []
    ooms = before.rank[0] - best.rank[0]
    saved = before.rank[1] - best.rank[1]
    if ooms:
        words.append(f"{ooms} of {before.rank[0]} OOMs less")
    if saved:
        share = f" ({abs(saved) / before.rank[1]:.1%})" if before.rank[1] else ""
        words.append(f"a peak of reserved memory that is {abs(saved) / MIB:,.1f} MiB{share} "
                     f"{'lower' if saved > 0 else 'higher'}")
    differences = {saved > 0 for saved in _saved_ns(before, best) if saved}
    if differences:
        less = "less or more, by the device," if len(differences) > 1 else "less" if True in differences else "more"
        words.append(f"{less} time in calls to the device (estimated{_not_counted(before, best)})")
    return f"The best of the settings that were tried gives {', '.join(words)} (modelled)."
