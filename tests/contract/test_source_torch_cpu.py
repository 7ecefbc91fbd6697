"""Source torch beside the real torch of this machine, as far as a CPU goes."""

from __future__ import annotations

import json

import pytest

from kvobs import model
from kvobs.bus import Bus
from kvobs.sources import _torch as source_module
from kvobs.sources._torch import TorchSource
from kvobs.sources._torch_stats import settings
from tests.support import run_python

torch = pytest.importorskip("torch", reason="torch is not installed; pip install 'kvobs[torch]' brings it.")
pytestmark = pytest.mark.torch
if torch.accelerator.current_accelerator() is not None:
    pytest.skip("This torch has an accelerator; these tests are about one that has none.", allow_module_level=True)


def test_a_cpu_build_has_no_events_and_says_why() -> None:
    """Without an accelerator the source reports its absence and nothing else, and leaves torch as it was."""
    before = dict(vars(torch.cuda.graphs.CUDAGraph))
    queue = list(torch.cuda._queued_calls)
    events: list[model.Event] = []
    source = TorchSource(Bus(8))
    source.install(events.append)
    torch.ones(1000).sum()
    assert list(source.sample(1)) == []
    assert list(source.availability()) == [model.Availability("torch", False, source_module.NO_ACCELERATOR)]
    source.uninstall()
    assert dict(vars(torch.cuda.graphs.CUDAGraph)) == before
    assert torch.cuda._queued_calls == queue
    assert not torch.cuda.is_initialized()
    assert events == []


def test_torch_is_not_imported_for_its_sake() -> None:
    """In a process that has not imported torch the source does not either; once the host does, it is seen."""
    done = run_python("""
import json, sys
from kvobs.bus import Bus
from kvobs.sources._torch import TorchSource
source = TorchSource(Bus(8))
source.install(lambda event: None)
said = []
def look():
    assert list(source.sample(1)) == []
    said.append([fact.reason for fact in source.availability()])
look()
assert "torch" not in sys.modules
import torch
look()
source.uninstall()
look()
print(json.dumps(said))
""")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[source_module.NOT_IMPORTED], [source_module.NO_ACCELERATOR],
                                       [source_module.NOT_IMPORTED]]


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
                    reason="This torch does not tell its allocator settings.")
def test_torchs_own_settings_string_is_understood() -> None:
    """The string that torch tells after it accepted it, from the environment or at run time, gives the pairs set."""
    done = run_python("""
import json, torch
told = [torch._C._accelerator_getAllocatorSettings()]
torch._C._accelerator_setAllocatorSettings("max_split_size_mb:64,garbage_collection_threshold:0.8")
print(json.dumps([*told, torch._C._accelerator_getAllocatorSettings()]))
""", PYTORCH_ALLOC_CONF="expandable_segments:True, roundup_power2_divisions:[256:1,512:2,>:4]")
    assert done.returncode == 0, done.stderr
    at_start, later = json.loads(done.stdout)
    assert settings(at_start) == (("expandable_segments", "True"),
                                  ("roundup_power2_divisions", "[256:1,512:2,>:4]"))
    assert settings(later) == (("max_split_size_mb", "64"), ("garbage_collection_threshold", "0.8"))


def test_the_names_that_are_read_exist_in_this_torch() -> None:
    """What a fake torch answers in the other tests is there under the same names in the real one."""
    from tests.fake_torch import FakeTorch

    fake = FakeTorch()
    for name in ("_accelerator_isAllocatorInitialized", "_accelerator_getDeviceStats",
                 "_accelerator_getAllocatorSettings"):
        assert hasattr(fake._C, name)
        assert hasattr(torch._C, name)
    for name in vars(fake.cuda):
        assert hasattr(torch.cuda, name), name
    for name in vars(fake.accelerator):
        assert hasattr(torch.accelerator, name), name
    assert {"capture_begin", "capture_end"} <= vars(torch.cuda.graphs.CUDAGraph).keys()
