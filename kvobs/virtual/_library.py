"""The compiled part: torch's headers and the allocator core, as one library per version of torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvobs.allocator._abi import CSettings, settings_of
from kvobs.allocator._build import COMPILERS, SOURCES, BuildError, Unit, compiler_of, in_cache, library
from kvobs.allocator.settings import Settings
from kvobs.config import ConfigError, load
from kvobs.virtual._devices import Unavailable

NATIVE = Path(__file__).resolve().parent / "native"
LEAST_TORCH = (2, 13)
OBSERVER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
_int, _i64, _u64, _double = ctypes.c_int, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
_pointer = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "error": (ctypes.c_char_p, ()),
    "setup": (_int, (_int, _pointer, _int, _pointer)),
    "history": (_int, (_int, _int, _int, _u64, _int)),
    "records": (_int, (_int,)),
    "set_fraction": (_int, (_int, _double)),
    "settings": (_int, (_int, ctypes.POINTER(CSettings))),
    "hold": (_int, (_int, _i64, _int)),
    "latencies": (_int, (_int, _pointer)),
    "plan": (_int, (_int, _pointer, _i64)),
    "base": (_u64, (_int,)),
    "largest_free": (_u64, (_int,)),
    "timing": (_int, (_int, _pointer, _pointer)),
    "copies": (None, (_int, _int, _pointer)),
    "observe": (None, (OBSERVER,)),
    "enter_pool": (_i64, (_int, _i64)),
    "open_pool": (_int, (_int, _i64)),
    "release_pool": (_int, (_int, _i64)),
    "snapshot": (_pointer, (_int, _int)),
    "drop": (None, (_pointer,)),
    "column": (_pointer, (_pointer, _int, _pointer)),
    "measure": (_double, (_int, _i64, _pointer, _i64)),
}


class Library:
    """The library's functions by their short names."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"kvobs_vgpu_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    if TYPE_CHECKING:
        def __getattr__(self, name: str) -> Any: ...

    def settings_of(self, device: int) -> Settings:
        """The settings in effect on a device."""
        told = CSettings()
        self.check(self.settings(device, ctypes.byref(told)))
        return settings_of(told)

    def check(self, code: int) -> None:
        """Turn a refusal into an exception.

        Raises:
            ValueError: the library's sentence.
        """
        if code:
            raise ValueError(self.error().decode("utf-8", "replace"))


def unit() -> Unit:
    """What is compiled, for the installed torch, which need not be imported for it.

    Raises:
        Unavailable: there is none, or it is too old.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise Unavailable("The virtual GPU needs torch: pip install 'kvobs[torch]'.")
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        raise Unavailable(f"The virtual GPU needs torch {least} or newer, and this is {version}.")
    root = Path(found.origin).parent
    if not (root / "include").is_dir():
        raise Unavailable(f"This torch ({version}) came without its headers, which the virtual GPU is compiled with.")
    flags = ("-std=c++20", "-O1", f"-I{SOURCES}", f"-I{root / 'include'}",
             f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", f"-L{root / 'lib'}", "-lc10",
             "-ltorch_cpu")
    return Unit("the virtual GPU", "vgpu.cpp", (NATIVE, SOURCES), flags, (version,))


def why_not(build: bool = True) -> str | None:
    """Why there can be no virtual GPU here, in a sentence; None if there can.

    With ``build`` it is compiled for it the first time; without, nothing is done, and a compiler is taken at its word.
    """
    try:
        if build:
            opened()
        else:
            _ready()
    except Unavailable as error:
        return str(error)
    return None


def compiled() -> bool:
    """Is the library in the cache already?"""
    try:
        return in_cache(_ready())
    except (BuildError, Unavailable):
        return False


def _ready() -> Unit:
    try:
        if load().native == "off":
            raise Unavailable("The virtual GPU is compiled C++, which is switched off (native=off).")
        if compiler_of() is None:
            raise Unavailable(f"The virtual GPU needs a C++ compiler; none ({', '.join(COMPILERS)}) is on the PATH.")
    except ConfigError as error:
        raise Unavailable(str(error)) from None
    return unit()


def opened() -> Library:
    """The library, loaded; the first time of a machine it is compiled (about half a minute).

    Raises:
        Unavailable: it cannot be had.
    """
    made = _ready()
    try:
        import torch  # noqa: F401  (its libraries must be loaded first)

        return Library(library(unit=made))
    except (BuildError, OSError) as error:
        raise Unavailable(f"There is no virtual GPU: {error}") from None
