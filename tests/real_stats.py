"""The statistics of PyTorch's allocator, counted by the second account of it where PyTorch's own code counts them."""

from __future__ import annotations

from typing import Any

from kvobs.allocator import recording as rec
from tests.real_histories import Real
from tests.real_memory import Home, Piece

ARRAYS = ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
          "inactive_split_bytes", "requested_bytes")
OVERSIZE = ("oversize_allocations", "oversize_segments")


class Stat:
    """One statistic: now, at most, and all that was ever added and taken away."""

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, by: int) -> None:
        self.current += by
        self.peak = max(self.peak, self.current)
        if by > 0:
            self.allocated += by
        else:
            self.freed -= by


class Counted(Real):
    """``Real`` with the statistics that ``torch.cuda.memory_stats`` flattens."""

    def __init__(self, capacity: int, **options: Any) -> None:
        super().__init__(capacity, **options)
        kinds = [f"{name}.{kind}" for name in ARRAYS for kind in ("all", "small_pool", "large_pool")]
        self.counted = {name: Stat() for name in (*kinds, *OVERSIZE)}
        self.numbers = dict.fromkeys(("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc",
                                      "num_device_free"), 0)
        self._asked = False

    def flat(self) -> dict[str, int]:
        """The statistics as ``torch.accelerator.memory_stats`` names them."""
        told = {f"{name}.{part}": getattr(stat, part) for name, stat in self.counted.items()
                for part in ("current", "peak", "allocated", "freed")}
        return told | self.numbers

    def reset_peaks(self) -> None:
        for stat in self.counted.values():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        for stat in self.counted.values():
            stat.allocated = stat.freed = 0
        self.numbers = dict.fromkeys(self.numbers, 0)

    def free(self, piece: Piece) -> None:
        self._count("allocation", piece.home, -1)
        self._count("allocated_bytes", piece.home, -piece.size)
        if self._oversize(piece.size):
            self.counted["oversize_allocations"].change(-1)
        super().free(piece)

    def _malloc(self, size: int, stream: int, pool: int) -> Piece:
        self._asked = True
        try:
            return super()._malloc(size, stream, pool)
        finally:
            self._asked = False

    def _found(self, piece: Piece, size: int, need: int, split: bool) -> Piece:
        part, whole, paged = piece.split, piece.size, piece.segment is not None
        found = super()._found(piece, size, need, split)
        if not paged:
            if split and part:
                self._count("inactive_split_bytes", found.home, -found.size)
            elif split:
                self._count("inactive_split_bytes", found.home, whole - found.size)
                self._count("inactive_split", found.home, 1)
            elif part:
                self._count("inactive_split_bytes", found.home, -found.size)
                self._count("inactive_split", found.home, -1)
        for name, by in (("allocation", 1), ("allocated_bytes", found.size), ("active", 1),
                         ("active_bytes", found.size), ("requested_bytes", size)):
            self._count(name, found.home, by)
        if self._oversize(found.size):
            self.counted["oversize_allocations"].change(1)
        return found

    def _free(self, piece: Piece) -> None:
        merged = [other.size for other in (piece.prev, piece.next) if other is not None and other.free and other.mapped]
        size = piece.size
        super()._free(piece)
        if piece.segment is None:
            self._count("inactive_split", piece.home, piece.split - len(merged))
            self._count("inactive_split_bytes", piece.home, (piece.size if piece.split else 0) - sum(merged))
        for name, by in (("active", 1), ("active_bytes", size), ("requested_bytes", piece.requested)):
            self._count(name, piece.home, -by)

    def _release_cached(self, pool: int) -> None:
        self.numbers["num_alloc_retries"] += self._asked
        self.numbers["num_sync_all_streams"] += pool == 0 and not self.mine
        super()._release_cached(pool)

    def _log(self, action: int, address: int, size: int, stream: int, home: Home) -> None:
        sign = (action in rec.TAKEN) - (action in rec.GIVEN_BACK)
        if sign:
            self.numbers["num_device_alloc" if sign > 0 else "num_device_free"] += 1
            self._count("reserved_bytes", home, sign * size)
        if action in (rec.SEGMENT_ALLOC, rec.SEGMENT_FREE):
            self._count("segment", home, sign)
            if self._oversize(size):
                self.counted["oversize_segments"].change(sign)
        self.numbers["num_ooms"] += action == rec.OOM
        super()._log(action, address, size, stream, home)

    def _count(self, name: str, home: Home, by: int) -> None:
        for kind in ("all", "small_pool" if home[1] else "large_pool"):
            self.counted[f"{name}.{kind}"].change(by)

    def _oversize(self, size: int) -> bool:
        return self.max_split is not None and size >= self.max_split
