"""What a breaker is told of a device each second, on the virtual GPU, against figures that are known beforehand."""

from __future__ import annotations

from tests.vgpu import needs_vgpu, on_vgpu

pytestmark = needs_vgpu()


def _scene(fraction: float):  # type: ignore[no-untyped-def]
    import torch

    from kvobs.allocator.forecast import Demand, Forecast, Growth
    from kvobs.bus import Bus
    from kvobs.sources._torch import TorchSource

    mib = 1 << 20
    asked: list[int] = []
    torch.vgpu.set_per_process_memory_fraction(fraction, 0)
    source = TorchSource(Bus(100))
    source.foresee(lambda: Forecast((Growth(Demand("vgpu:0", 0, 0, tuple(asked))),) if asked else ()))
    source.install(lambda _: None)
    told = {}  # type: ignore[var-annotated]
    second = iter(range(1, 100))

    def look(name: str, *sizes: int) -> None:
        asked[:] = sizes
        found = source.live(next(second) * 10**12, 0.5)
        told[name] = None if found is None else [[one.device, one.headroom, one.verdict] for one in found]

    kept = [torch.empty(20 * mib, dtype=torch.uint8, device="vgpu:0") for _ in range(4)]
    look("nothing asked")
    look("the device gives it", 10 * mib)
    look("more than there is", 200 * mib)
    gone = [kept.pop(0), kept.pop(1)]  # two free segments of 20 MiB that are no neighbours
    del gone
    look("a free block", 15 * mib)
    fill = [torch.empty(10 * mib, dtype=torch.uint8, device="vgpu:0")
            for _ in range(int((100 * fraction - 80) // 10))]
    look("between", 30 * mib)
    exact, = source.verdict("vgpu:0")
    told["exact"] = str(exact.verdict)
    source.uninstall()
    look("uninstalled")
    return told, len(fill)


def test_what_is_left_and_what_becomes_of_the_next_step() -> None:
    """On a device of 100 MiB with 80 of them in use a fifth is left; bounds and snapshots give the twin's verdicts."""
    told, _ = on_vgpu(_scene, devices=("100MiB",), fraction=1.0)
    (device, left, verdict), = told["nothing asked"]
    assert (device, verdict) == ("vgpu:0", "SERVED")
    assert abs(left - 0.2) < 1e-9
    assert told["the device gives it"][0][2] == "GROW"
    assert told["more than there is"][0][2] == "CAPACITY"
    (_, left, verdict), = told["a free block"]
    assert abs(left - 0.6) < 1e-9
    assert verdict == "GROW"  # the device has 20 MiB for it, so that no free block is looked for
    assert told["between"][0][2] == told["exact"]
    assert told["uninstalled"] is None


def test_a_memory_fraction_is_what_the_process_may_have() -> None:
    """Where the process may have 90 of 100 MiB, 80 in use leave a ninth."""
    told, _ = on_vgpu(_scene, devices=("100MiB",), fraction=0.9)
    (_, left, _), = told["nothing asked"]
    assert abs(left - 1 / 9) < 1e-9
    assert told["between"][0][2] == told["exact"]
