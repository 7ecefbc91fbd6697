"""The decision board: what readers take for a decision, and what they do not."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from kvobs.breaker import _board
from kvobs.breaker._board import BYTES, BoardReader, BoardWriter, Record, board_directory, decode, encode
from kvobs.breaker._gate import ACT, OBSERVE, Decision, Probation
from kvobs.breaker._limits import UNLIMITED, Limits
from kvobs.breaker._probing import MOST_TICKETS
from tests.support import ROOT, child_environment, wait_until

SECOND = 10**9
LIMITS = (UNLIMITED, Limits(max_new_tokens=7, history_tokens=70), Limits(admit=False))

PUBLISHES = """
import sys, time
from pathlib import Path
from kvobs.breaker._board import BoardWriter
from kvobs.breaker._gate import Decision
from kvobs.breaker._limits import Limits
writer = BoardWriter(Path(sys.argv[1]), "child")
for generation in range(10**9):
    writer.publish(Decision(generation=generation, level=3, mode="act", limits=(Limits(),) * 3, retry_after_s=1.0,
                            expires_ns=time.monotonic_ns() + 60 * 10**9))
    if generation == 0:
        print("published", flush=True)
"""


class Clock:
    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def decision(generation: int = 1, **changed: object) -> Decision:
    given: dict[str, object] = {"generation": generation, "level": 3, "mode": ACT, "limits": LIMITS,
                                "retry_after_s": 2.5, "expires_ns": 2 * SECOND, "reason": "The pool is full."}
    return Decision(**(given | changed))  # type: ignore[arg-type]


@pytest.fixture
def clock() -> Clock:
    """The reader's clock; the writer's stands at 0, and the two have nothing to do with each other."""
    return Clock(777 * SECOND)


def writing(directory: Path, process: str = "one") -> BoardWriter:
    return BoardWriter(directory, process, lambda: 0)


def test_readers_see_what_was_published(tmp_path: Path, clock: Clock) -> None:
    """A decision comes through unchanged but for its end, which is on the reader's clock; the newest counts."""
    writer, reader = writing(tmp_path), BoardReader(tmp_path, clock=clock)
    assert reader.decision() is None
    writer.publish(decision(1))
    assert reader.decision() == decision(1, expires_ns=779 * SECOND)
    writer.publish(decision(2, level=1, mode=OBSERVE))
    assert reader.decision() == decision(2, level=1, mode=OBSERVE, expires_ns=779 * SECOND)
    writer.close()
    reader.close()


def test_the_file_is_the_owners_and_small(tmp_path: Path) -> None:
    """The file may be read by its owner only whatever the umask says, has its size at once, and goes with ``close``."""
    before = os.umask(0)
    try:
        writer = writing(board_directory(tmp_path))
        writer.publish(decision())
        found = writer.path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_size) == (0o600, BYTES)
        assert stat.S_IMODE(writer.path.parent.stat().st_mode) == 0o700
        writer.close()
        writer.close()
        assert not writer.path.exists()
        writer.publish(decision())
        assert not writer.path.exists()
    finally:
        os.umask(before)


def test_readers_let_go_when_the_writer_closes(tmp_path: Path, clock: Clock) -> None:
    """After ``close`` the last decision is over at once, though it would have held for longer."""
    writer, reader = writing(tmp_path), BoardReader(tmp_path, clock=clock)
    writer.publish(decision())
    assert reader.decision() is not None
    writer.close()
    assert reader.decision() is None


def test_a_record_that_is_not_followed_by_another_ends(tmp_path: Path, clock: Clock) -> None:
    """A writer that lives and says nothing more (SIGSTOP) is believed for its record's time from when it was first
    seen, and again once it says something.
    """
    writer, reader = writing(tmp_path), BoardReader(tmp_path, clock=clock)
    writer.publish(decision())
    assert reader.decision() is not None
    clock.now_ns += 2 * SECOND - 1
    assert reader.decision() is not None
    clock.now_ns += 1
    assert reader.decision() is None
    writer.publish(decision())
    assert reader.decision() is not None
    writer.close()
    reader.close()


def test_no_record_holds_longer_than_the_age_limit(tmp_path: Path, clock: Clock) -> None:
    """However long the writer says that it holds, a record ends at the reader's own limit."""
    writer, reader = writing(tmp_path), BoardReader(tmp_path, max_age_s=5.0, clock=clock)
    writer.publish(decision(expires_ns=10**6 * SECOND))
    assert reader.decision() is not None
    clock.now_ns += 5 * SECOND
    assert reader.decision() is None
    writer.publish(decision(expires_ns=-SECOND))
    assert reader.decision() is None
    writer.close()
    reader.close()


def test_a_killed_writer_is_known_at_once_and_swept_by_the_next(tmp_path: Path) -> None:
    """After SIGKILL no reader sees the last decision any more, and the next writer removes the file."""
    process = subprocess.Popen([sys.executable, "-c", PUBLISHES, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                               env=child_environment(), cwd=ROOT)
    reader = BoardReader(tmp_path, max_age_s=3_600)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "published\n"
        wait_until(lambda: reader.decision() is not None, what="a decision of the child")
    finally:
        process.kill()
        process.communicate()
    assert reader.decision() is None
    assert BoardReader(tmp_path).decision() is None
    assert (tmp_path / "child.board").exists()
    writer = writing(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one.board"]
    writer.close()


def test_a_stopped_writer_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGSTOP ends what the writer said after its time, SIGCONT makes it heard again."""
    process = subprocess.Popen([sys.executable, "-c", PUBLISHES, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                               env=child_environment(), cwd=ROOT)
    reader = BoardReader(tmp_path, max_age_s=0.2)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "published\n"
        wait_until(lambda: reader.decision() is not None, what="a decision")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: reader.decision() is None, what="the end of the last decision")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: reader.decision() is not None, what="a decision after SIGCONT")
    finally:
        process.kill()
        process.communicate()
        reader.close()


def test_a_forked_child_lets_the_parents_board_be(tmp_path: Path) -> None:
    """After ``abandon`` in a child the file is the parent's still, and a copy of its descriptor keeps nobody alive."""
    writer = writing(tmp_path)
    writer.publish(decision())
    child = os.fork()
    if child == 0:
        writer.abandon()
        writer.publish(decision(2))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    reader = BoardReader(tmp_path)
    found = reader.decision()
    assert found is not None
    assert found.generation == 1
    writer.close()
    reader.close()


def test_of_several_engines_the_one_that_asks_for_most_counts(tmp_path: Path, clock: Clock) -> None:
    """Acting comes before observing and then the higher level; one that is gone does not count."""
    calm, acting, observing = (writing(tmp_path, name) for name in ("calm", "acting", "observing"))
    reader = BoardReader(tmp_path, clock=clock)
    calm.publish(decision(1, level=0))
    acting.publish(decision(2, level=2))
    observing.publish(decision(3, mode=OBSERVE))
    for writer, generation in ((acting, 2), (calm, 1), (observing, 3)):
        found = reader.decision()
        assert found is not None
        assert found.generation == generation
        writer.close()
    assert reader.decision() is None


def test_boards_of_another_group_or_host_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of a process group takes that group's boards of this host only; one without takes all."""
    writer = writing(tmp_path)
    writer.publish(decision())
    ours = os.getpgid(0)
    assert BoardReader(tmp_path, group=ours).decision() is not None
    assert BoardReader(tmp_path, group=ours + 1).decision() is None
    assert BoardReader(tmp_path).decision() is not None
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert BoardReader(tmp_path, group=ours).decision() is None
    writer.close()


def test_what_is_no_board_is_passed_by(tmp_path: Path, clock: Clock) -> None:
    """A missing directory, a pipe, a link, a folder, an empty, a foreign and a short file give no decision."""
    assert BoardReader(tmp_path / "nowhere").decision() is None
    os.mkfifo(tmp_path / "pipe.board")
    (tmp_path / "folder.board").mkdir()
    (tmp_path / "empty.board").touch()
    (tmp_path / "foreign.board").write_bytes(b"x" * BYTES)
    real = writing(tmp_path / "real")
    real.publish(decision())
    (tmp_path / "link.board").symlink_to(real.path)
    reader = BoardReader(tmp_path, clock=clock)
    assert reader.decision() is None
    reader.close()
    reader = BoardReader(tmp_path / "real", clock=clock)
    assert reader.decision() is not None
    os.truncate(real.path, BYTES // 2)
    assert reader.decision() is None
    real.publish(decision(2))
    assert reader.decision() is not None
    real.close()
    reader.close()


def test_a_record_that_stays_torn_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn record is read again, three times in all, and then there is no decision; a whole one counts."""
    writer = writing(tmp_path)
    writer.publish(decision())
    whole = writer.path.read_bytes()
    newer = encode(Record("h", 1, SECOND, decision(2)), 2)
    torn, reads = newer[:BYTES // 2] + whole[BYTES // 2:], []
    answers = [torn, torn, whole]
    monkeypatch.setattr(_board.os, "pread", lambda *_: reads.append(1) or answers[(len(reads) - 1) % len(answers)])
    assert BoardReader(tmp_path).decision() is not None
    assert len(reads) == 3
    reads.clear()
    answers[2] = torn
    assert BoardReader(tmp_path).decision() is None
    assert len(reads) == 3
    writer.close()


def test_a_record_needs_one_number_at_both_ends() -> None:
    """A record whose two sequence numbers differ is torn, also where its checksum is right."""
    whole = encode(Record("h", 1, SECOND, decision()), 7)
    torn = whole[:-12] + (8).to_bytes(8, "little")
    assert decode(whole) is not None
    assert decode(torn + zlib.crc32(torn).to_bytes(4, "little")) is None


def test_long_texts_are_cut() -> None:
    """A reason of any length and any characters fits the record, without half a character at its end."""
    for text in ("ä" * 5_000, "\ud800" * 5_000, "\0" * 5_000, "🙂" * 500):
        data = encode(Record(text, 1, 2, decision(reason=text)), 9)
        found = decode(data)
        assert len(data) == BYTES
        assert found is not None
        assert found[0] == 9
        shown = text.encode("utf-8", "backslashreplace").decode()
        assert shown.startswith(found[1].decision.reason)
        assert len(found[1].decision.reason.encode()) > 380


def test_the_longest_record_fits() -> None:
    """The longest texts and limits, with as many tickets as may be out after four billion, come back whole."""
    limits = Limits(admit=False, max_new_tokens=2**63 - 1, history_tokens=2**63 - 1)
    probation = Probation("f" * 32, tuple(range(2**32 - MOST_TICKETS, 2**32)), MOST_TICKETS, 2**63 - 1)
    longest = decision(generation=2**63 - 1, mode="observe", limits=(limits,) * 3, reason="r" * 384,
                       probation=probation, expires_ns=0)
    found = decode(encode(Record("h" * 128, 2**31, 2**63 - 1, longest), 2**63))
    assert found is not None
    assert found[1].decision == longest


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    """Two writers of one name do not share a file: the second is refused."""
    writer = writing(tmp_path)
    with pytest.raises(OSError, match=r"^The decision board .* is another process's\.$"):
        writing(tmp_path)
    writer.close()
