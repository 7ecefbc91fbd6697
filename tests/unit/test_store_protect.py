"""What the breaker decided and did, kept and read back."""

from __future__ import annotations

from pathlib import Path

from kvobs import model
from kvobs.store import StoreReader, StoreWriter, actions, decisions
from tests.events import EXAMPLES

SECOND = 10**9


def test_decisions_and_actions_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Every field comes back, numbers and words of signals as such, with the time of the wall clock."""
    decided, = [one for one in EXAMPLES if isinstance(one, model.Decided)]
    taken, = [one for one in EXAMPLES if isinstance(one, model.ActionTaken)]
    writer = StoreWriter(tmp_path, 8 << 20, "p", clock=lambda: 0, wall=lambda: 100 * SECOND)
    writer.write([decided, taken])
    writer.commit()
    writer.close()
    reader = StoreReader(tmp_path)
    assert [(one.process, one.wall_ns, one.record) for one in decisions(reader)] == [("p", 100 * SECOND + 21, decided)]
    assert [(one.process, one.wall_ns, one.record) for one in actions(reader)] == [("p", 100 * SECOND + 22, taken)]
