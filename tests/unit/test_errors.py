"""Failures are told apart: real exceptions, raised by the standard library and by whatever else is installed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from pathlib import Path

import pytest

from kvobs.errors import CLASSES, MEANINGS, ROWS, ErrorRow, Table, _end, add, classify, of_status, remove
from kvobs.errors import _verdicts as verdicts
from tests.failures import CASES, Case, Missing

MIB = 1 << 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_real_failures_land_in_their_class(case: Case, tmp_path: Path) -> None:
    """Each exception, raised for real, is of the class that was written beside it by hand."""
    try:
        case.fail(tmp_path)
    except BaseException as raised:
        error = raised
    else:
        pytest.fail("Nothing was raised.")
    if isinstance(error, Missing):
        pytest.skip(str(error))
    assert classify(error) == case.expected, "".join(traceback.format_exception(error))


def test_there_are_enough_cases() -> None:
    """At least 40 of the cases need no library beyond the standard one or what kvobs depends on; names are unique."""
    assert sum(not case.needs for case in CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


def test_rows_name_known_classes_and_every_class_has_a_meaning() -> None:
    """Labels are bounded: the built-in table has no class beyond those that are documented."""
    assert {row.error_class for row in ROWS} <= set(CLASSES) == set(MEANINGS)


def chained(error: BaseException, cause: BaseException | None = None, context: BaseException | None = None,
            hide: bool = False) -> BaseException:
    try:
        try:
            if context is not None:
                raise context
        finally:
            if hide:
                raise error from None
            if cause is not None:
                raise error from cause
            raise error
    except BaseException as raised:
        return raised


def test_what_an_exception_came_from_tells_its_class() -> None:
    """The cause counts before the context, a suppressed context does not count, and a type's own row before both."""
    refused, late = ConnectionRefusedError(111, "no"), TimeoutError()
    assert classify(chained(RuntimeError("x"), cause=late)) == "network_timeout"
    assert classify(chained(RuntimeError("x"), context=late)) == "network_timeout"
    assert classify(chained(RuntimeError("x"), cause=refused, context=late)) == "network_unreachable"
    assert classify(chained(RuntimeError("x"), context=late, hide=True)) == "internal"
    assert classify(chained(refused, cause=late)) == "network_unreachable"
    assert classify(chained(chained(RuntimeError("x"), cause=KeyError(1)), cause=late)) == "network_timeout"


def test_loops_and_long_chains_end() -> None:
    """A chain that bites its tail and one of a thousand exceptions are read to a bound."""
    one, two = RuntimeError("1"), RuntimeError("2")
    one.__cause__, two.__cause__ = two, one
    assert classify(one) == "internal"
    top: Exception = TimeoutError()
    for _ in range(1_000):
        above = RuntimeError("x")
        above.__cause__ = top
        top = above
    assert classify(top) == "internal"


def test_groups_are_of_their_first_telling_member() -> None:
    """Members that are cancelled or internal give way; cancelled alone stays; nested groups count as one member."""
    def group(*found: BaseException) -> BaseException:
        return BaseExceptionGroup("some", list(found))

    cancelled = asyncio.CancelledError()
    assert classify(group(cancelled, KeyError(1), MemoryError(), TimeoutError())) == "out_of_memory"
    assert classify(group(cancelled, KeyError(1))) == "internal"
    assert classify(group(cancelled)) == "cancelled"
    assert classify(group(KeyError(1), group(cancelled, TimeoutError()))) == "network_timeout"
    assert classify(chained(RuntimeError("x"), cause=group(TimeoutError()))) == "network_timeout"


class Hostile(Exception):
    """Everything about it raises."""

    def __str__(self) -> str:
        raise ValueError("no text")

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("no attribute")


def test_hostile_exceptions_are_internal() -> None:
    """An exception whose text and attributes raise is classified all the same."""
    assert classify(Hostile()) == "internal"
    assert Table([ErrorRow(error_class="x", message="y")]).classify(Hostile()) == "internal"


class Lost(LookupError):
    """A library's own error."""


def test_rows_can_be_added_and_taken_out() -> None:
    """The newest row comes first and matches by type, message and code together, in subclasses too."""
    name = f"{Lost.__module__}.{Lost.__qualname__}"
    first = add("lost", types=[name])
    second = add("lost_for_good", types=["builtins.LookupError"], message=r"for good", codes=[7])
    try:
        good = Lost("lost for GOOD")
        assert classify(good) == "lost"
        good.code = 7  # type: ignore[attr-defined]
        assert classify(good) == "lost_for_good"
        assert classify(Lost("now")) == "lost"
    finally:
        remove(first)
        remove(second)
    assert classify(Lost("now")) == "internal"


@pytest.mark.parametrize(("given", "why"), [
    ({"error_class": "Not A Name", "types": ["a.b"]}, "has the class"), ({"error_class": "x"}, "needs types"),
    ({"error_class": "x", "types": ["TimeoutError"]}, "names the type"),
    ({"error_class": "x", "message": "("}, "no regular expression")])
def test_bad_rows_are_refused_in_a_sentence(given: dict[str, object], why: str) -> None:
    """A row that can match nothing, or whose class would be no label, is refused and nothing changes."""
    with pytest.raises(ValueError, match=why) as caught:
        add(**given)  # type: ignore[arg-type]
    assert str(caught.value).startswith("The row ")
    assert str(caught.value).endswith(".")


def test_rows_of_code_are_bounded() -> None:
    """The 33rd added row is refused: each may bring a label's value."""
    with contextlib.ExitStack() as stack:
        for number in range(32):
            stack.callback(remove, add(f"c{number}", message=f"{number}"))
        with pytest.raises(ValueError, match="At most 32"):
            add("c32", message="32")


def test_a_row_that_comes_while_the_table_is_made_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that was begun without it is used once and not kept; taking one out then is the same."""
    mine, row = _end.Rules(), ErrorRow(error_class="mine", message="^mine$")
    waiting = [lambda: mine.add(row), lambda: mine.remove(row)]

    def configured() -> tuple[ErrorRow, ...]:
        if waiting:
            waiting.pop(0)()
        return ()

    monkeypatch.setattr(_end, "_configured", configured)
    found = [mine.table.classify(Exception("mine")) for _ in range(4)]
    assert found == ["internal", "mine", "internal", "internal"]


def test_there_is_a_table_whoever_comes_between() -> None:
    """A row that is added in the moment in which the table is ready takes it away from nobody."""
    class Raced(_end.Rules):
        @property
        def _table(self) -> Table | None:
            return self.__dict__.get("kept")

        @_table.setter
        def _table(self, table: Table | None) -> None:
            self.__dict__["kept"] = table
            if table is not None and not self._added:
                self.add(ErrorRow(error_class="mine", message="^mine$"))

    mine = Raced()
    assert mine.table is not None
    assert mine.table.classify(Exception("mine")) == "mine"


def test_a_forked_child_needs_no_lock_of_its_parent() -> None:
    """A thread that held the lock is not there in the child, and rows can be added."""
    mine, held, done = _end.Rules(), threading.Event(), threading.Event()

    def hold() -> None:
        with mine._lock:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(30)
        assert not mine._lock.acquire(blocking=False)
        mine.after_fork_in_child()
        mine.add(ErrorRow(error_class="mine", message="^mine$"))
        assert mine.table.classify(Exception("mine")) == "mine"
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(("status", "expected"), [
    (400, "validation_failed"), (404, "refused"), (422, "validation_failed"), (429, "unavailable"),
    (500, "internal"), (502, "upstream"), (503, "unavailable"), (504, "network_timeout"), (599, "internal")])
def test_statuses(status: int, expected: str) -> None:
    """Where only a status is known it tells the class."""
    assert of_status(status) == expected


CUDA_TEXT = ("CUDA out of memory. Tried to allocate 32.00 MiB. GPU 1 has a total capacity of 23.69 GiB of which 12.81 "
             "MiB is free. Of the allocated memory 22.33 GiB is allocated by PyTorch")


@pytest.mark.parametrize(("verdict", "expected"), [
    ("CAPACITY", "kv_capacity"), ("FRAGMENTED", "kv_fragmented"), ("WRONG_POOL", "kv_fragmented"),
    ("WAIT", "kv_fragmented"), ("SERVED", "out_of_memory"), (None, "out_of_memory")])
def test_the_verdict_tells_capacity_from_fragmentation(verdict: str | None, expected: str) -> None:
    """The newest verdict on a request like the one in the error's text decides; whoever has none stays as it was."""
    verdicts.forget()
    try:
        verdicts.note(1, 32 * MIB, "CAPACITY" if verdict == "FRAGMENTED" else "FRAGMENTED", 10)
        verdicts.note(1, 32 * MIB, verdict, 20)
        verdicts.note(1, 64 * MIB, "SERVED", 30)  # another request
        verdicts.note(0, 32 * MIB, "SERVED", 30)  # another device
        assert verdicts.of_message(CUDA_TEXT, 40) == expected
        assert verdicts.of_message(CUDA_TEXT, 40 + verdicts.LIFE_NS) == "out_of_memory"
        assert verdicts.of_message("out of memory", 40) == "out_of_memory"
    finally:
        verdicts.forget()


@pytest.mark.parametrize(("asked", "segment"), [("2.00 MiB", 20 * MIB), ("512 bytes", 2 * MIB),
                                                ("13.38 MiB", 14 * MIB)])
def test_cuda_tells_the_segment(asked: str, segment: int) -> None:
    """CUDA's observer is told the segment that was asked of the device, which is larger than the request."""
    verdicts.forget()
    try:
        verdicts.note(1, segment, "CAPACITY", 20)
        assert verdicts.of_message(CUDA_TEXT.replace("32.00 MiB", asked), 40) == "kv_capacity"
    finally:
        verdicts.forget()
