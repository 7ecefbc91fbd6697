"""Ids of caches and pools in a process that several sources observe."""

from __future__ import annotations

from kvobs.sources import _identity
from kvobs.sources.transformers._caches import CacheRecord


def test_no_two_caches_of_a_process_have_one_id() -> None:
    """Caches of transformers and pools of serving engines count with the same numbers: gauges go by the id alone."""
    seen = [CacheRecord("m", 0).id, _identity.next_cache_id(), CacheRecord("m", 0).id, _identity.next_cache_id()]
    assert len(set(seen)) == len(seen)


def test_a_record_lives_as_long_as_its_object_and_is_told_of_its_end_once() -> None:
    """Records are kept by identity, not by equality; one that was cleared away hears nothing."""
    class Thing:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    kept: _identity.ByIdentity[str] = _identity.ByIdentity()
    ended: list[str] = []
    first, second, third = Thing(), Thing(), Thing()
    for thing, name in ((first, "first"), (second, "second"), (first, "again"), (third, "third")):
        kept.add(thing, name, ended.append)
    assert (kept.get(first), kept.get(second), sorted(kept.records())) == ("first", "second", [
        "first", "second", "third"])
    del thing, first
    assert ended == ["first"]
    assert sorted(kept.clear()) == ["second", "third"]
    del second, third
    assert ended == ["first"]
