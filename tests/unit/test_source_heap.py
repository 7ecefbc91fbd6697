"""The C heap: known amounts are seen, and where glibc's numbers would not be true there are none."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvobs import model
from kvobs.catalog import BY_NAME
from kvobs.sources import _glibc
from kvobs.sources._heap import INTERVAL_PER_COST, RARE, UNREADABLE, HeapSource
from tests.support import child_environment, run_child, run_python

MiB = 1 << 20
GLIBC = _glibc.find()
real = pytest.mark.skipif(isinstance(GLIBC, str), reason=str(GLIBC))
SECOND = 1_000_000_000

# A child that does little else: it says what the heap source read before and after each deed.
CHILD = """
import ctypes, json, sys, threading
from kvobs.sources._heap import HeapSource
from kvobs import model

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
source = HeapSource()
source.install(lambda event: None)
now = 0

def read():
    global now
    now += 10**12
    poll, state = source.sample(now)
    usage = {attributes[0]: value for name, attributes, value in poll.readings if name == "kvobs.heap.usage"}
    trimmable = [value for name, _, value in poll.readings if name == "kvobs.heap.trimmable"]
    return usage | {"trimmable": trimmable[0], "reserved": state.reserved_bytes, "allocated": state.allocated_bytes,
                    "largest": state.largest_free_bytes}

def in_a_thread(deed):
    thread = threading.Thread(target=deed)
    thread.start()
    thread.join()

readings = [read()]
"""


def told(deeds: str) -> list[dict[str, int]]:
    """Run the deeds in the child; the readings in their order."""
    done = run_python(CHILD + deeds + "\nprint(json.dumps(readings))")
    assert done.returncode == 0, done.stderr
    readings: list[dict[str, int]] = json.loads(done.stdout)
    return readings


@real
def test_a_large_block_is_mapped_and_given_back() -> None:
    """64 MiB are seen as a mapping of 64 MiB and its page of header, in both views, and are gone after free."""
    before, held, after = told("""
block = libc.malloc(64 << 20); readings.append(read())
libc.free(block); readings.append(read())
""")
    assert 64 * MiB <= held["mapped"] - before["mapped"] <= 64 * MiB + 8192
    for view in ("reserved", "allocated"):
        assert held[view] - before[view] == pytest.approx(64 * MiB, abs=MiB)
    assert after["mapped"] == before["mapped"]


@real
def test_small_blocks_are_used_and_their_holes_are_free() -> None:
    """Of 400 blocks of 100,000 B every second is freed: 40 MB in use become 20 MB in use and 20 MB in free chunks."""
    before, held, holed = told("""
blocks = [libc.malloc(100_000) for _ in range(400)]; readings.append(read())
for block in blocks[::2]: libc.free(block)
readings.append(read())
""")
    chunk = 100_016  # rounded up to 16 with the size in front
    assert held["used"] - before["used"] == pytest.approx(400 * chunk, abs=MiB // 2)
    assert held["used"] - holed["used"] == pytest.approx(200 * chunk, abs=MiB // 2)
    assert holed["free"] - held["free"] == pytest.approx(200 * chunk, abs=MiB // 2)
    assert holed["reserved"] == held["reserved"]  # nothing went back: that is the fragmentation


@real
def test_the_arena_of_another_thread_counts() -> None:
    """What a thread allocated in its own arena is used, and is free once it was freed, though the thread is gone."""
    before, held, freed = told("""
blocks = []
in_a_thread(lambda: blocks.extend(libc.malloc(100_000) for _ in range(400)))
readings.append(read())
in_a_thread(lambda: [libc.free(block) for block in blocks])
readings.append(read())
""")
    assert held["used"] - before["used"] == pytest.approx(400 * 100_016, abs=MiB)
    assert held["used"] - freed["used"] == pytest.approx(400 * 100_016, abs=MiB)


@real
def test_the_largest_free_chunk_is_the_largest_hole() -> None:
    """With the rest of the heap in use, the hole of 16 MiB that was just made is the largest free chunk."""
    _, small, hole = told("""
libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
assert libc.mallopt(-3, 1 << 28) and libc.mallopt(-1, 1 << 28)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: all from the heap
fence, block, fence = (libc.malloc(size << 20) for size in (1, 16, 1)); readings.append(read())
libc.free(block); readings.append(read())
""")
    assert small["largest"] < 4 * MiB
    assert 16 * MiB + 16 <= hole["largest"] <= 16 * MiB + 64


@real
def test_two_views_of_glibc_agree() -> None:
    """In a process that does nothing else, what malloc_info adds up per arena is what mallinfo2 says."""
    reading = """
from kvobs.sources import _glibc, _malloc_info
import gc

glibc = _glibc.find()
holes = [libc.malloc(100_000) for _ in range(400)]
for block in holes[::2]: libc.free(block)
gc.disable()
text, sums = glibc.malloc_info(), glibc.mallinfo()
told = _malloc_info.parse(text)
readings = [{"system": told.system_bytes, "free": told.free_bytes, "mapped": told.mapped_bytes},
            {"system": sums.arena, "free": sums.free, "mapped": sums.mapped, "used": sums.used}]
"""
    info, sums = told(reading)
    assert info["free"] > 200 * 100_000
    for name in ("system", "free", "mapped"):
        assert info[name] == pytest.approx(sums[name], abs=MiB)
    assert sums["used"] + sums["free"] == sums["system"]


@real
def test_another_malloc_in_front_is_detected(tmp_path: Path) -> None:
    """With a preloaded malloc the heap is absent and the reason names the library; glibc would have told nonsense."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc is not installed; apt-get install gcc brings it.")
    (tmp_path / "other.c").write_text("""
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <errno.h>
static char *next, *end;
static char lock;
static void *bump(size_t align, size_t size) {
    while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {}
    if (!next) { next = mmap(0, 1UL << 32, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                 end = next + (1UL << 32); }
    char *at = (char *)(((size_t)next + 16 + align - 1) / align * align);
    ((size_t *)at)[-1] = size;
    next = at + size;
    __atomic_clear(&lock, __ATOMIC_RELEASE);
    return next < end ? at : 0;
}
void *malloc(size_t n) { return bump(16, n); }
void free(void *p) { (void)p; }
void *calloc(size_t n, size_t m) { return bump(16, n * m); }
void *realloc(void *p, size_t n) {
    void *q = bump(16, n);
    if (p) { size_t had = ((size_t *)p)[-1]; memcpy(q, p, had < n ? had : n); }
    return q;
}
int posix_memalign(void **p, size_t a, size_t n) { *p = bump(a, n); return 0; }
void *aligned_alloc(size_t a, size_t n) { return bump(a, n); }
void *memalign(size_t a, size_t n) { return bump(a, n); }
size_t malloc_usable_size(void *p) { return p ? ((size_t *)p)[-1] : 0; }
""")
    library = tmp_path / "libother_malloc.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-fno-builtin", "-O1", "-o", library, tmp_path / "other.c"],
                   check=True, timeout=60)
    code = """
from kvobs.sources._heap import HeapSource
source = HeapSource(); source.install(None)
print(list(source.sample(1)), [(fact.subject, fact.available, fact.reason) for fact in source.availability()])
"""
    done = run_child([sys.executable, "-c", code], env=child_environment(LD_PRELOAD=str(library)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([]) + " " + str([(
        "heap", False, "Another malloc (libother_malloc.so) serves this process, of which glibc knows nothing.")])


class Musl:
    """A C library without the functions that only glibc has."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.mark.parametrize(("libc", "reason"), [
    (Musl(), _glibc.NOT_GLIBC),
    (SimpleNamespace(gnu_get_libc_version=None), _glibc.TOO_OLD),
])
def test_another_c_library_is_absent_with_its_reason(libc: Any, reason: str) -> None:
    """Without glibc, or with one that lacks mallinfo2, there are no events and one sentence that says why."""
    source = HeapSource(find=lambda: _glibc.find(libc))
    source.install(lambda event: None)
    assert list(source.sample(1)) == []
    assert list(source.availability()) == [model.Availability("heap", False, reason)]


class Fake:
    """A glibc whose calls take as long as the test says."""

    def __init__(self, text: str = "") -> None:
        self.now_ns, self.cost_ns, self.calls, self.text = 0, 0, 0, text

    def clock(self) -> int:
        return self.now_ns

    def mallinfo(self) -> _glibc.MallInfo:
        self.calls += 1
        self.now_ns += self.cost_ns
        return _glibc.MallInfo(arena=1000, used=600, free=400, mapped=50, top=100)

    def malloc_info(self) -> str:
        return self.text


def fake_source(fake: Any) -> HeapSource:
    source = HeapSource(find=lambda: fake, clock=fake.clock)
    source.install(lambda event: None)
    return source


def test_events_are_those_of_the_contract() -> None:
    """The readings name rows and attributes of the catalog, and the state counts arenas and mappings."""
    source = fake_source(Fake())
    poll, state = source.sample(7)
    assert isinstance(poll, model.Poll)
    assert all(len(BY_NAME[name].attributes) == len(attributes) for name, attributes, _ in poll.readings)
    assert dict(zip((attributes for _, attributes, _ in poll.readings), (v for *_, v in poll.readings),
                    strict=True)) == {("used",): 600, ("free",): 400, ("mapped",): 50, (): 100}
    assert state == model.AllocatorState(7, "cpu", 1050, 650, None)


def test_an_answer_that_is_not_understood_leaves_the_largest_chunk_absent() -> None:
    """Usage is still told, the largest free chunk is absent, and the reason says so."""
    source = fake_source(Fake("<html/>"))
    _, state = source.sample(1)
    assert isinstance(state, model.AllocatorState)
    assert state.largest_free_bytes is None
    assert list(source.availability())[1] == model.Availability("heap: largest free chunk", False, UNREADABLE)


@pytest.mark.parametrize(("cost_ns", "seconds"), [(100_000, 1), (15_000_000, 30)])
def test_reading_takes_half_a_thousandth_of_the_time_at_most(cost_ns: int, seconds: int) -> None:
    """However long one reading takes, over two minutes of seconds it takes at most 1/2000 (and one reading) of them."""
    fake = Fake()
    fake.cost_ns = cost_ns
    source = fake_source(fake)
    for second in range(120):
        list(source.sample(second * SECOND))
    assert fake.calls == 120 // seconds
    assert fake.calls * cost_ns <= 120 * SECOND / INTERVAL_PER_COST + cost_ns
    rare = next(iter(source.availability()))
    assert rare == model.Availability("heap", True, RARE if seconds > 5 else "")


def test_waiting_is_no_cost() -> None:
    """A reading that waits (for the GIL, say) but computes little does not make the next one later."""

    class Waiting(Fake):
        def mallinfo(self) -> _glibc.MallInfo:
            threading.Event().wait(0.05)  # fifty seconds' worth of cost, were it one
            return super().mallinfo()

    waiting: Any = Waiting()
    source = HeapSource(find=lambda: waiting)
    source.install(lambda event: None)
    for second in range(0, 30, 10):
        assert list(source.sample(second * SECOND))
    assert waiting.calls == 3


def test_nothing_is_read_after_uninstall() -> None:
    """An uninstalled source has no events, says so, and may be installed again."""
    fake = Fake()
    source = fake_source(fake)
    source.uninstall()
    source.uninstall()
    assert list(source.sample(1)) == []
    assert [fact.available for fact in source.availability()] == [False]
    source.install(lambda event: None)
    assert len(list(source.sample(2))) == 2


@real
def test_the_probe_frees_what_it_took() -> None:
    """Looking for glibc's malloc again and again leaves not one probe block behind."""
    assert isinstance(GLIBC, _glibc.Glibc)
    libc = ctypes.CDLL(None)
    before = GLIBC.mallinfo()
    for _ in range(64):
        _glibc.find(libc)
    after = GLIBC.mallinfo()
    assert after.used + after.mapped - before.used - before.mapped < 16 * MiB
