"""The decision board: no reader ever sees a mixed or damaged record."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvobs.breaker._board import BYTES, BoardReader, BoardWriter, Record, decode, encode
from kvobs.breaker._gate import Decision
from kvobs.breaker._limits import Limits
from tests.support import ROOT, child_environment

SECOND = 10**9
counts = st.integers(0, 2**62)
limits = st.builds(Limits, admit=st.booleans(), max_new_tokens=st.none() | counts, history_tokens=st.none() | counts)
decisions = st.builds(Decision, generation=counts, level=st.integers(0, 3), mode=st.sampled_from(["observe", "act"]),
                      limits=st.tuples(limits, limits, limits), retry_after_s=st.floats(0, 1e6), expires_ns=st.just(0),
                      reason=st.text(st.characters(codec="utf-8"), max_size=90))
records = st.builds(Record, host=st.text(st.characters(codec="ascii"), max_size=64), group=counts, lifetime_ns=counts,
                    decision=decisions)

HAMMERS = """
import sys
from pathlib import Path
from tests.property.test_breaker_board import mirrored
from kvobs.breaker._board import BoardWriter
writer = BoardWriter(Path(sys.argv[1]), "hammer", lambda: 0)
generation = 0
print("ready", flush=True)
while True:
    generation += 1
    writer.publish(mirrored(generation))
"""


def mirrored(generation: int) -> Decision:
    """A decision in which everything follows from its number, so that a mix of two shows."""
    one = Limits(max_new_tokens=generation, history_tokens=generation * 3)
    return Decision(generation=generation, level=generation % 4, mode="act", limits=(one, one, one),
                    retry_after_s=float(generation), expires_ns=SECOND, reason=f"{generation} " * (1 + generation % 40))


def check(found: Decision | None) -> int:
    if found is None:
        return 0
    plain = mirrored(found.generation)
    assert (found.level, found.limits, found.retry_after_s, found.reason) == (
        plain.level, plain.limits, plain.retry_after_s, plain.reason)
    return found.generation


@given(record=records, sequence=st.integers(0, 2**63))
def test_every_record_comes_back(record: Record, sequence: int) -> None:
    """What is written is read: any decision, in a record of the one size."""
    data = encode(record, sequence)
    assert len(data) == BYTES
    assert decode(data) == (sequence, record)


@given(record=records, where=st.integers(0, BYTES - 1), by=st.integers(1, 255), end=st.integers(0, BYTES - 1))
def test_no_damage_passes(record: Record, where: int, by: int, end: int) -> None:
    """A record with any byte changed, or cut at any place, is none."""
    data = encode(record, 7)
    assert decode(data[:where] + bytes([data[where] ^ by]) + data[where + 1:]) is None
    assert decode(data[:end]) is None
    assert decode(data + b"\0") is None


@given(one=records, other=records, at=st.integers(17, BYTES - 12))
def test_no_mix_of_two_records_passes(one: Record, other: Record, at: int) -> None:
    """The beginning of a record and the end of the next are none, wherever the cut between their numbers is."""
    assert decode(encode(one, 7)[:at] + encode(other, 8)[at:]) is None


@given(data=st.binary(max_size=2 * BYTES))
def test_any_bytes_are_a_board_or_none(data: bytes) -> None:
    """Whatever lies in the file, reading it does not raise."""
    assert decode(data) is None


def test_readers_see_whole_records_of_a_thread(tmp_path: Path) -> None:
    """Beside a thread that publishes all the time, decisions are whole and their numbers only grow."""
    writer, stop = BoardWriter(tmp_path, "one", lambda: 0), threading.Event()

    def publish() -> None:
        generation = 0
        while not stop.is_set():
            generation += 1
            writer.publish(mirrored(generation))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        assert growing(BoardReader(tmp_path)) > 1
    finally:
        stop.set()
        thread.join()
        writer.close()


def test_readers_see_whole_records_of_a_process(tmp_path: Path) -> None:
    """Beside another process that publishes all the time, decisions are whole and their numbers only grow."""
    process = subprocess.Popen([sys.executable, "-c", HAMMERS, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                               env=child_environment(), cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert growing(BoardReader(tmp_path)) > 1
    finally:
        process.kill()
        process.communicate()


def growing(reader: BoardReader) -> int:
    """How many different decisions 20,000 looks saw."""
    seen, last = set(), 0
    for _ in range(20_000):
        generation = check(reader.decision())
        assert generation == 0 or generation >= last
        last = max(last, generation)
        seen.add(generation)
    reader.close()
    return len(seen - {0})
