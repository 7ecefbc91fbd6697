"""The proof after every test can itself fail."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType

import pytest

from kvobs.sessions._scope import _current as session_variable
from kvobs.sources._patch import Patches
from tests import traces


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for a watched third-party module, with one class."""
    name = "transformers.cache_utils"
    module = ModuleType(name)
    exec("class Cache:\n    def update(self): return 1\n    @classmethod\n    def make(cls): return cls()\n",
         vars(module))
    module.Cache.__module__ = name
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_a_clean_process_leaves_nothing() -> None:
    """Two pictures without anything in between differ in nothing."""
    assert traces.left_since(traces.take()) == []


def test_a_patch_is_seen_until_it_is_restored(library: ModuleType) -> None:
    """A replaced method is named; after restore by identity nothing is."""
    before = traces.take()
    patches = Patches("test", lambda event: None)
    patches.wrap(library.Cache, "update", lambda original: lambda self: original(self))
    assert traces.left_since(before) == ["transformers.cache_utils.Cache.update is another object than before"]
    patches.restore()
    assert traces.left_since(before) == []


def test_an_equal_but_other_function_is_seen(library: ModuleType) -> None:
    """Restoring a copy of the original is not restoring it."""
    before = traces.take()
    source = library.Cache.update
    library.Cache.update = type(source)(source.__code__, source.__globals__, source.__name__)
    assert traces.left_since(before) == ["transformers.cache_utils.Cache.update is another object than before"]
    library.Cache.update = source


def test_a_removed_attribute_is_seen(library: ModuleType) -> None:
    """An attribute that is no longer there is named."""
    before = traces.take()
    del library.Cache.make
    assert traces.left_since(before) == ["transformers.cache_utils.Cache.make is gone"]


def test_a_hook_in_a_library_imported_meanwhile_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an earlier picture a function whose code lies in kvobs is still recognised, also under a wrapper."""
    before = traces.take()
    module = ModuleType("transformers.generation.late")
    module.direct = traces.kvobs.config.load
    exec("def over(): pass", vars(module))
    module.over.__wrapped__ = traces.kvobs.config.load
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert traces.left_since(before) == ["transformers.generation.late.direct is a hook of kvobs",
                                         "transformers.generation.late.over is a hook of kvobs"]


def test_a_thread_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A living thread whose name says kvobs is named, one that ends is not."""
    monkeypatch.setattr(traces, "_ended", lambda thread: not thread.is_alive())
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="kvobs-test")
    before = traces.take()
    thread.start()
    assert traces.left_since(before) == ["thread kvobs-test"]
    release.set()
    thread.join()
    assert traces.left_since(before) == []


def test_a_session_that_stays_in_force_is_seen() -> None:
    """A context variable of kvobs that still holds a value is named."""
    before = traces.take()
    token = session_variable.set("stale")  # type: ignore[arg-type]
    assert traces.left_since(before) == ["context variable kvobs_session = 'stale'"]
    session_variable.reset(token)


def test_a_changed_logger_and_environment_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers on kvobs's logger and environment variables that appear are named."""
    before = traces.take()
    handler = logging.NullHandler()
    logging.getLogger("kvobs").addHandler(handler)
    monkeypatch.setenv("KVOBS_STORE", "off")
    left = traces.left_since(before)
    logging.getLogger("kvobs").removeHandler(handler)
    assert len(left) == 2
    assert left[0] == "environment variables [('KVOBS_STORE', 'off')]"
    assert left[1].startswith("the kvobs logger is ")
