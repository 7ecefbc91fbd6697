"""The store's tables of serving engines: what was written is what is read."""

from __future__ import annotations

from pathlib import Path

from kvobs import model
from kvobs.store import StoreReader, StoreWriter, phases, pools, preemptions, requests

ORIGIN = model.Origin("vllm", "tiny", "BlockPool", "cpu", "bfloat16")
SECOND = 1_000_000_000


def written(tmp_path: Path, *events: model.Event) -> StoreReader:
    writer = StoreWriter(tmp_path, 8 << 20, "one", clock=lambda: 5 * SECOND, wall=lambda: 105 * SECOND)
    writer.write(events)
    writer.commit()
    writer.close()
    assert writer.take_dropped() == 0
    return StoreReader(tmp_path)


def test_the_last_word_of_a_second_on_a_pool_is_kept(tmp_path: Path) -> None:
    """Counts of a pool are told as they stood at the end of each second."""
    moments = ((SECOND, 1), (SECOND + 5, 20), (3 * SECOND, 9))
    work = [model.PoolWork(t_ns, ORIGIN, 7, *range(count, count + 14)) for t_ns, count in moments]
    found = pools(written(tmp_path, *work))
    assert [(one.wall_ns, one.record) for one in found] == [(101 * SECOND, work[1]), (103 * SECOND, work[2])]


def test_preemptions_and_phases_come_back_whole(tmp_path: Path) -> None:
    """Each preemption and each phase is kept, in the order of time, with the process's clock turned into Unix time."""
    lost = model.Preemption(2 * SECOND, ORIGIN, 7, "r1", "s", "blocks", "r2", 96, 3, (("r2", 5), ("r1", 3)))
    spent = [model.RequestPhase(2 * SECOND, SECOND, ORIGIN, 7, "r1", "s", "queued", "", 0),
             model.RequestPhase(4 * SECOND, 2 * SECOND, ORIGIN, 7, "r1", "s", "prefill", "cancelled", 3)]
    reader = written(tmp_path, lost, *spent)
    assert [(one.wall_ns, one.record) for one in preemptions(reader)] == [(102 * SECOND, lost)]
    assert [(one.wall_ns, one.record) for one in phases(reader)] == [(102 * SECOND, spent[0]), (104 * SECOND, spent[1])]
    columns = ("start_wall_ns", "wall_ns")
    assert [row[1:] for row in reader.rows("phases", columns)] == [(101 * SECOND, 102 * SECOND),
                                                                    (102 * SECOND, 104 * SECOND)]


def test_who_is_in_the_engine_is_the_newest_word(tmp_path: Path) -> None:
    """Of each pool the newest states are kept; the times of their rows are Unix time."""
    row = model.RequestRow("r1", "s", "normal", "waiting", "blocks", "queued", SECOND, 2 * SECOND, 40, 0, 0, 0, 0, 0)
    old = model.RequestStates(3 * SECOND, ORIGIN, 7, 4096, 8, (("waiting", "blocks", 2),), (row,), 1)
    new = model.RequestStates(4 * SECOND, ORIGIN, 7, 4096, 8, (("waiting", "blocks", 1),), (row,), 0, "r1", 2, "WAIT",
                              "It waits.")
    (found,) = requests(written(tmp_path, old, new))
    assert found.wall_ns == 104 * SECOND
    (shown,) = found.record.rows
    assert (shown.arrived_ns, shown.since_ns) == (101 * SECOND, 102 * SECOND)
    unknown = model.RequestRow("r2", "", "normal", "running", "", "", None, None, 40, 0, 0, None, 0, 0)
    (found,) = requests(written(tmp_path / "other", model.RequestStates(
        4 * SECOND, ORIGIN, 7, 4096, 8, (("running", "", 1),), (unknown,), 0)))
    assert found.record.rows == (unknown,)
    (found,) = requests(StoreReader(tmp_path))
    assert (found.record.counts, found.record.more, found.record.next_needs) == (new.counts, 0, 2)
    assert (found.record.next_verdict, found.record.next_sentence) == ("WAIT", "It waits.")
