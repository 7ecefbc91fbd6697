"""Every test starts clean and, as is proven after each, leaves nothing of kvobs behind."""

from __future__ import annotations

import os

# Before torch is imported anywhere: two cores are shared, and oversubscription is what makes tests slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import traces
from tests.support import SETTINGS_PREFIXES

hypothesis.settings.register_profile("dev", deadline=None, max_examples=100)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=300, derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the allocator twin and none of its readers: nothing of it depends on other packages' versions."""
    for item in items:
        names = {str(getattr(found, "__module__", None) or getattr(found, "__name__", "")) + "."
                 for found in vars(getattr(item, "module", None) or object).values()}
        if any(name.startswith("kvobs.allocator.") for name in names) and not any(
                name.startswith("kvobs.allocator.readers.") for name in names):
            item.add_marker("allocator")


def pytest_collection_finish() -> None:
    """Single-threaded torch: results and times do not depend on what else runs."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Set up first and torn down last: no hook, thread, context or registry entry of kvobs outlives a test."""
    before = traces.take()
    yield
    left = traces.left_since(before)
    traces.clean_up()
    assert not left, "The test left kvobs behind: " + "; ".join(left)


@pytest.fixture(autouse=True)
def isolated_settings(nothing_left_behind: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the developer's shell reaches a test; stores and ports are the test's own."""
    for name in list(os.environ):
        if name.startswith(SETTINGS_PREFIXES) and not name.startswith("KVOBS_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KVOBS_PROMETHEUS", "127.0.0.1:0")
