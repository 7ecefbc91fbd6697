"""Files made to harm their reader: refused in one sentence, within the limits, and without anything run or left."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvobs.allocator.readers import Unreadable, _child, _formats, _limits, _parent, _pickle, _wire, read
from kvobs.allocator.recording import Recording
from tests.fuzz import documents
from tests.support import ROOT, run_child

# Nine bytes: protocol 2, None, LONG_BINPUT with index 0x11eeeeee (room for 4.8 GB of entries), STOP.
BOMB = b"\x80\x02Nr\xee\xee\xee\x11."


def written(folder: Path, data: bytes, name: str = "hostile") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def refusal(path: Path, **limits: Any) -> str:
    with pytest.raises(Unreadable) as caught:
        read(path, **limits)
    text = str(caught.value)
    assert text.startswith(f"{path} ")
    assert text.endswith(".")
    assert "\n" not in text
    return text


def test_the_memo_bomb_of_nine_bytes_is_refused_before_pickle_sees_it(tmp_path: Path,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """LONG_BINPUT with an index that the file cannot fill is refused by the walk; pickle is not called."""
    assert len(BOMB) == 9
    monkeypatch.setattr(_pickle, "_Unpickler", None)
    with pytest.raises(_limits.Refused, match="asks for a memo larger than the file"):
        _pickle.load(BOMB, lambda done: None)
    assert "asks for a memo larger than the file" in refusal(written(tmp_path, BOMB))


def test_the_memo_bomb_would_not_get_its_memory_either() -> None:
    """Even if the walk let it pass, the limited process has no gigabytes to give: MemoryError, not death."""
    program = ("import pickle; from kvobs.allocator.readers import _limits; _limits.apply(_limits.memory_for(9), 5)\n"
               f"try: pickle.loads({BOMB!r})\nexcept MemoryError: print('no memory')")
    done = run_child([sys.executable, "-c", program], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "no memory\n"), done.stderr


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    """A pickle that would call a function is refused, and the function is not called."""
    target = tmp_path / "made"
    refusal(written(tmp_path, pickle.dumps({"segments": [_Runs(target)]}, protocol)))
    assert not target.exists()


@pytest.mark.parametrize("opcodes", [
    b"cos\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"(ios\nsystem\n", b"Pid\n", b"NQ", b"\x82\x01", b"\x83\x01\x00",
    b"\x84\x01\x00\x00\x00", b"N)R", b"N}b", b"(No", b"N)\x81", b"N)}\x92", b"\x8b\xff\xff\xff\x7f",
    b"\x8a\xff" + b"1" * 255, b"\x8a\x0a" + b"1" * 10, b"\x96" + b"\xff" * 8, b"B\xff\xff\xff\x7f", b"C\x01x",
    b"I1\n", b"L1L\n", b"F1.0\n", b"Vx\n", b"S'x'\n", b"\x8f", b"N\x85", b"]]\x86", b"NNN\x87", b"(NNNNt", b")",
    b"\x97", b"q\x00\xff"])
def test_opcodes_that_torch_does_not_write_are_refused_by_the_walk(opcodes: bytes) -> None:
    """Code, calls, references, extension codes, byte arrays, long integers, texts, tuples but pairs of integers."""
    with pytest.raises(_limits.Refused, match=r"^It is a pickle that .*\.$"):
        _pickle.check(b"\x80\x04" + opcodes + b".")


def test_pickle_itself_would_refuse_code_too() -> None:
    """The second wall: the unpickler finds no class and loads nothing persistent."""
    import io

    for data in (b"\x80\x04cos\nsystem\n.", b"\x80\x04Pid\n.", b"\x80\x04NQ."):
        with pytest.raises(_limits.Refused, match="which is not allowed"):
            _pickle._Unpickler(io.BytesIO(data)).load()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    """Wherever a snapshot is cut off, pickled, as JSON, or packed, there is a refusal and no other exception."""
    document = documents.modern()
    for whole in (pickle.dumps(document, 2), pickle.dumps(document, 4), json.dumps(document).encode(),
                  gzip.compress(pickle.dumps(document))):
        _formats.parse(whole, "whole")
        for length in range(len(whole)):
            with pytest.raises(ValueError, match=r"^[A-Z].*\.$"):
                _formats.parse(whole[:length], "cut")
    assert "cut off" in refusal(written(tmp_path, pickle.dumps(document)[:-1]))


def test_deep_and_cyclic_documents_are_refused(tmp_path: Path) -> None:
    """A hundred thousand levels, or a list that holds itself, end in a sentence."""
    deep = b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b"."
    refusal(written(tmp_path, deep))
    refusal(written(tmp_path, b"[" * 100_000 + b"]" * 100_000))
    refusal(written(tmp_path, b'{"segments":' * 100_000 + b"1" + b"}" * 100_000))
    cycle: dict[str, Any] = {"device_traces": [[]]}
    cycle["segments"] = [cycle]
    refusal(written(tmp_path, pickle.dumps(cycle)))
    frames: list[Any] = []
    frames.append(frames)
    traces = [[{"action": "alloc", "addr": 0, "size": 0, "frames": frames}]]
    refusal(written(tmp_path, pickle.dumps({"segments": [], "device_traces": traces})))


def test_one_segment_named_a_million_times_is_counted_as_a_million(tmp_path: Path) -> None:
    """What a file repeats by reference counts each time: bounds hold for what is read, not for what is stored."""
    segment = documents.segments()[0] | {"blocks": [{"size": 512, "state": "inactive"}] * 2000}
    text = refusal(written(tmp_path, pickle.dumps([segment] * 2000)))
    assert f"{_limits.MAX_BLOCKS:,} are allowed" in text


def test_too_much_memory_is_one_sentence(tmp_path: Path) -> None:
    """A file whose objects pass the limit says how much is allowed; this process does not grow."""
    path = written(tmp_path, b"\x80\x04" + b"}" * 3_000_000 + b".")
    text = refusal(path, memory_bytes=200 << 20)
    assert "more than the 200 MiB of memory that are allowed" in text


def test_too_much_time_is_one_sentence(tmp_path: Path) -> None:
    """Dicts whose keys all have the same hash take their time: the limit ends it."""
    prime = (1 << 61) - 1
    keys = b"".join(b"\x8a\x09" + (prime * key).to_bytes(9, "little") + b"\x94" for key in range(500))
    fetches = b"".join(b"j" + struct.pack("<I", key) + b"N" for key in range(500))
    path = written(tmp_path, b"\x80\x04(" + keys + b"1" + (b"}(" + fetches + b"u0") * 2000 + b"N.")
    assert "more than the 1 s of a core that are allowed" in refusal(path, cpu_seconds=1)


def test_a_packed_bomb_is_refused(tmp_path: Path) -> None:
    """A .gz of zeros unpacks to what memory allows and no more."""
    text = refusal(written(tmp_path, gzip.compress(bytes(64 << 20))), memory_bytes=120 << 20)
    assert "more than the 120 MiB of memory that are allowed" in text
    assert "unpack it first" in refusal(written(tmp_path, gzip.compress(gzip.compress(b"x"))))
    whole = bytearray(gzip.compress(pickle.dumps(documents.modern())))
    whole[-5] ^= 1
    assert "damaged .gz" in refusal(written(tmp_path, bytes(whole)))


def test_what_is_no_file_or_no_known_file_is_said(tmp_path: Path) -> None:
    """Missing, empty, a folder, a pipe, a device, prose: one sentence each."""
    assert "No such file" in refusal(tmp_path / "missing")
    assert "is empty" in refusal(written(tmp_path, b""))
    assert "no regular file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(tmp_path / "pipe")
    assert "no regular file" in refusal(Path("/dev/zero"))
    assert "a kind that kvobs does not know" in refusal(written(tmp_path, b"Dear reader,\nthis is no snapshot.\n"))


@pytest.mark.parametrize(("said", "why"), [
    ("", "ended without an answer (status 0)"), ("Hello", "ended without an answer (status 0)"),
    ("P" + "\\0" * 8, "ended without an answer (status 0)"),
    ("R\\x05\\0\\0\\0\\0\\0\\0\\0xxxxx", "an answer that makes no sense"),
    ("R" + "\\xff" * 8, "an answer that makes no sense"), ("E" + "\\xff" * 8, "an answer that makes no sense"),
    ("Z" + "\\0" * 8, "an answer that makes no sense")])
def test_a_child_that_says_nonsense_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    said: str, why: str) -> None:
    """Silence, other bytes, lengths of exabytes, a recording that is none: the file is unreadable, nothing else."""
    monkeypatch.setattr(_parent, "_START", f"import sys; {{paths!r}}; sys.stdout.buffer.write(b'{said}')")
    assert why in refusal(written(tmp_path, pickle.dumps(documents.modern())))


@pytest.mark.parametrize("death", ["os.abort()", "os.kill(os.getpid(), 11)", "os._exit(3)", "raise SystemExit(4)"])
def test_a_child_that_dies_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str) -> None:
    """A crash in the child is an unreadable file here."""
    monkeypatch.setattr(_parent, "_START", f"import os; {{paths!r}}; {death}")
    assert "ended without an answer (status" in refusal(written(tmp_path, b"x"))


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time that is allowed the child is killed, whatever it does."""
    note = tmp_path / "pid"
    monkeypatch.setattr(_parent, "_START", f"import os, threading; {{paths!r}}; open({str(note)!r}, 'w').write(str("
                                           "os.getpid())); threading.Event().wait()")
    monkeypatch.setattr(_parent, "_WALL_SPARE", 1)
    assert "takes longer than is allowed" in refusal(written(tmp_path, b"x"), cpu_seconds=0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_progress_rises_to_the_end_and_may_end_the_reading(tmp_path: Path) -> None:
    """What is told lies between 0 and 1 and never falls; an exception from it ends the child and passes on."""
    document = documents.modern()
    document["device_traces"][0] *= 5000
    path = written(tmp_path, pickle.dumps(document))
    told: list[float] = []
    read(path, progress=told.append)
    assert told == sorted(told)
    assert len(told) > 5
    assert 0.0 <= told[0] < 0.1
    assert 0.9 < told[-1] <= 1.0

    def stop(done: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(path, progress=stop)


def test_reading_works_in_any_thread_and_leaves_no_descriptor(tmp_path: Path) -> None:
    """From several threads at once, as a Streamlit page would, the same is read, and no file stays open."""
    path = written(tmp_path, pickle.dumps(documents.modern()))
    before = len(os.listdir("/proc/self/fd"))
    found: list[Recording] = []
    threads = [threading.Thread(target=lambda: found.append(read(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(one == found[0] for one in found)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_child_is_lean_and_does_not_observe_itself(tmp_path: Path) -> None:
    """It loads nothing heavy, runs no sitecustomize, and does not see this process's settings."""
    hook = written(tmp_path, b"raise SystemExit('sitecustomize ran')", "sitecustomize.py")
    snapshot = written(tmp_path, pickle.dumps(documents.modern()))
    listing = tmp_path / "modules"
    spy = ("import sys; sys.path += {paths!r}; from kvobs.allocator.readers import _child, _formats, _wire; import os; "
           f"open({str(listing)!r}, 'w').write(chr(10).join([*sys.modules, *os.environ]))")
    program = f"""
import sys
sys.path[:] = {[str(ROOT), *sys.path]!r}
from pathlib import Path
from kvobs.allocator.readers import _parent
_parent.read(Path({str(snapshot)!r}))
_parent._START = {spy!r}
try:
    _parent.read(Path({str(snapshot)!r}))
except _parent.Unreadable:
    pass
"""
    done = run_child([sys.executable, "-S", "-c", program], env={"PYTHONPATH": str(hook.parent), "KVOBS_STORE": "x"})
    assert done.returncode == 0, done.stderr
    loaded = listing.read_text().split("\n")
    assert "msgspec" in loaded
    heavy = {"torch", "numpy", "pandas", "rich", "typer", "asyncio", "opentelemetry", "kvobs.config", "kvobs.runtime",
             "sitecustomize", "subprocess", "socket", "KVOBS_STORE", "PYTHONPATH"}
    assert heavy & set(loaded) == set()


def test_a_recording_that_was_tampered_with_is_refused() -> None:
    """Every index out of range, column of another length, kind or type is found on arrival."""
    whole = _wire.pack(_formats.parse(pickle.dumps(documents.modern()), "x"))
    assert _wire.unpack(whole, "x") == _formats.parse(pickle.dumps(documents.modern()), "x")
    import msgspec

    told = msgspec.msgpack.decode(whole)

    def tampered(change: Any) -> bytes:
        copy = msgspec.msgpack.decode(whole)
        change(copy)
        return msgspec.msgpack.encode(copy)

    device = told[2][0]
    assert len(device) == 5

    def column(path: list[int], data: bytes) -> Any:
        def change(message: Any) -> None:
            node = message
            for step in path:
                node = node[step]
            node[1] = data
        return change

    changes = [column([2, 0, 3, 0], b"\x20" * 11), column([2, 0, 3, 5], struct.pack("<11i", *[99] * 11)),
               column([2, 0, 3, 6], struct.pack("<11i", *[-2] * 11)), column([2, 0, 3, 1], b"12345678"),
               column([2, 0, 3, 1], b"123"), column([2, 0, 1, 3], struct.pack("<i", 7)),
               column([2, 0, 1, 7], struct.pack("<i", 2)), column([2, 0, 1, 7], struct.pack("<i", -1)),
               column([2, 0, 2, 3], b"\x03\x00\x00"), column([5, 0], struct.pack("<i", 1)),
               column([5, 1], struct.pack("<2i", 0, 9)), lambda message: message[2][0][3].pop(),
               lambda message: message.__setitem__(4, [["a"]]),
               lambda message: message.__setitem__(1, {"max_split_size": []})]
    for change in changes:
        with pytest.raises(_wire.Damaged):
            _wire.unpack(tampered(change), "x")
    for length in range(0, len(whole), 7):
        with pytest.raises(_wire.Damaged):
            _wire.unpack(whole[:length], "x")


def test_the_messages_of_the_child_fit_its_reader() -> None:
    """One letter, eight bytes of length: what one side packs the other unpacks."""
    assert _child.HEADER.size == 9
    assert _child.HEADER.unpack(_child.HEADER.pack(_child.RESULT, 1 << 40)) == (b"R", 1 << 40)
