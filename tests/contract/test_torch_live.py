"""What a breaker is told of a device each second, on the virtual GPU, against figures that are known beforehand."""

from __future__ import annotations

from tests.vgpu import needs_vgpu, on_vgpu

pytestmark = needs_vgpu()


def _scene(fraction: float):  # type: ignore[no-untyped-def]
    import itertools

    import torch

    from kvobs.allocator.forecast import Demand, Forecast, Growth
    from kvobs.bus import Bus
    from kvobs.sources import _torch_live
    from kvobs.sources._torch import TorchSource

    mib = 1 << 20
    asked: list[int] = []
    unknown: list[str] = []
    torch.vgpu.set_per_process_memory_fraction(fraction, 0)
    source = TorchSource(Bus(100))
    source.foresee(lambda: Forecast((Growth(Demand("vgpu:0", 0, 0, tuple(asked))),) if asked else (),
                                    tuple(unknown)))
    source.install(lambda _: None)
    told = {}  # type: ignore[var-annotated]
    second = iter(range(1_000, 2_000))

    def look(name: str, *sizes: int) -> None:
        asked[:] = sizes
        found = source.live(next(second) * 10**9, 0.5)
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
    unknown.append("A cache is not known.")
    for name, size in (("known in part", 1), ("known in part, and short", 200), ("known in part, exactly", 30)):
        look(name, size * mib)
    unknown.clear()
    # Looks while a snapshot takes a second of a clock that stands still else, and half of the time may go to looks.
    now, verdicts = [0], _torch_live.verdicts

    def slow(*given):  # type: ignore[no-untyped-def]
        now[0] += 10**9
        return verdicts(*given)

    source._live, _torch_live.verdicts = _torch_live.Live(lambda: now[0]), slow
    told["seconds"] = []
    for at in range(5):
        second = itertools.chain([at, at], second)
        look("dear", 30 * mib)
        look("cheap", 200 * mib)
        told["seconds"].append([*told["dear"], *told["cheap"]])
    _torch_live.verdicts = verdicts
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


def test_of_a_step_that_is_known_in_part_only_bad_news_is_told() -> None:
    """What is not known can only add to it: no verdict instead of GROW; CAPACITY stays, and so does RECLAIM, which a
    snapshot tells.
    """
    told, _ = on_vgpu(_scene, devices=("100MiB",), fraction=1.0)
    assert told["between"][0][2] == "RECLAIM"
    assert [told[name][0][2] for name in ("known in part", "known in part, and short", "known in part, exactly")] == [
        None, "CAPACITY", told["between"][0][2]]
    assert told["known in part"][0][1] == told["between"][0][1]


def test_a_dear_snapshot_keeps_nobody_from_what_counters_tell() -> None:
    """A quarter of the time may go to snapshots: one that took a second is due again after four; meanwhile the share
    that is left, and what is certain, are told every second.
    """
    told, _ = on_vgpu(_scene, devices=("100MiB",), fraction=1.0)
    left, exact = told["between"][0][1:]
    assert told["seconds"] == [[["vgpu:0", left, exact if second in (0, 4) else None], ["vgpu:0", left, "CAPACITY"]]
                               for second in range(5)]


def test_a_memory_fraction_is_what_the_process_may_have() -> None:
    """Where the process may have 90 of 100 MiB, 80 in use leave a ninth."""
    told, _ = on_vgpu(_scene, devices=("100MiB",), fraction=0.9)
    (_, left, _), = told["nothing asked"]
    assert abs(left - 1 / 9) < 1e-9
    assert told["between"][0][2] == told["exact"]
