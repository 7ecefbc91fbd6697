"""What a file may ask of its reader. Beyond these bounds it is refused, and the process that reads it is limited."""

from __future__ import annotations

MIB = 1 << 20
MAX_FILE_BYTES = 2048 * MIB
MAX_UNPACKED_BYTES = 2048 * MIB  # of a .gz
MAX_RESULT_BYTES = 1024 * MIB  # what the child may hand back
MAX_DEVICES = 128  # torch numbers devices in 8 bits
MAX_SEGMENTS = 1 << 20
MAX_BLOCKS = 2 << 20
MAX_EVENTS = 20_000_000
MAX_ANNOTATIONS = 1 << 20
MAX_POOLS = 1 << 16
MAX_FRAMES = 1 << 20  # distinct ones
MAX_STACK_FRAMES = 16 << 20  # of all distinct stacks together
MAX_STACK_DEPTH = 1 << 14
MAX_TEXT = 1 << 14  # characters of one name; C++ templates need thousands
MAX_TEXT_BYTES = 128 * MIB  # of all distinct names together
MAX_SIZE = 1 << 50  # bytes of one block, segment or request: more than any device has
MAX_TOTAL_SIZE = 1 << 61  # bytes of all of one column together, so that sums fit 64 bits
MAX_ADDRESS = 1 << 63
MAX_CONF = 4096  # characters of PYTORCH_ALLOC_CONF

_MEMORY_BASE = 256 * MIB
_MEMORY_PER_BYTE = 24  # measured need of snapshots: 5 to 7 bytes for each of the file's
_MEMORY_CAP = 4096 * MIB
CPU_SECONDS = 60


class Refused(ValueError):
    """The file is not what it should be; the message is one whole sentence."""


def memory_for(size: int) -> int:
    """The address space, in bytes, that reading a file of ``size`` (unpacked) bytes may take."""
    return min(_MEMORY_BASE + _MEMORY_PER_BYTE * size, _MEMORY_CAP)


def apply(memory_bytes: int, cpu_seconds: int) -> None:
    """Hold this process to the limits: it can take no more, write no file, start no process (unless it is root's) and
    dump no core.
    """
    import resource

    # Beyond the first CPU limit comes SIGXCPU, which tells that it was this; beyond the second SIGKILL.
    for what, soft, most in ((resource.RLIMIT_AS, memory_bytes, memory_bytes),
                             (resource.RLIMIT_CPU, cpu_seconds, cpu_seconds + 2), (resource.RLIMIT_CORE, 0, 0),
                             (resource.RLIMIT_NOFILE, 32, 32), (resource.RLIMIT_FSIZE, 0, 0),
                             (resource.RLIMIT_NPROC, 0, 0)):
        _, hard = resource.getrlimit(what)
        if hard != resource.RLIM_INFINITY:
            soft, most = min(soft, hard), min(most, hard)
        resource.setrlimit(what, (soft, most))


def count(found: int, allowed: int, what: str) -> None:
    """Refuse more than ``allowed`` of something.

    Raises:
        Refused: there are more.
    """
    if found > allowed:
        raise Refused(f"It holds {found:,} {what}, and {allowed:,} are allowed.")
