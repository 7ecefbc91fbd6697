"""A session goes from device to device and back between its turns, another one stays where it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from kvobs.lab.demo._observer import Observer
from kvobs.lab.scenarios._engine import BUFFERS, BYTES_PER_TOKEN, MIB, Engine, cached
from kvobs.lab.scenarios._truth import Expected, Played, Truth

DEVICES = (64 * MIB, 64 * MIB)
ROUTE = (0, 1, 0, 1)  # the device of each of its turns
PAIRS = ((0, 1), (1, 0))


def _moves(src: int, dst: int) -> list[int]:
    """After which of its turns the session goes this way."""
    return [turn for turn, way in enumerate(pairwise(ROUTE), start=1) if way == (src, dst)]


def _expected() -> list[Expected]:
    found = []
    for src, dst in PAIRS:
        moves = _moves(src, dst)
        count, size = BUFFERS * len(moves), BYTES_PER_TOKEN * sum(map(cached, moves))
        way = f"vgpu:{src} to vgpu:{dst}"
        found += [
            Expected(f"buffers {way}", count, f"K and V of 2 layers, {len(moves)} times"),
            Expected(f"bytes {way}", size, f"{' + '.join(str(cached(turn)) for turn in moves)} tokens of "
                                           f"{BYTES_PER_TOKEN} bytes"),
            Expected(f"device's own copies {way}", count, "nothing else goes from device to device"),
            Expected(f"device's own bytes {way}", size, "nothing else goes from device to device")]
    return found


TRUTH = Truth("migration", "A session has its four turns on vgpu:0, 1, 0 and 1; another one stays on vgpu:0.", (
    *_expected(),
    Expected("devices by turn", [f"vgpu:{device}" for device in ROUTE], "the route")))


def play(observer: Observer) -> Played:
    """Two sessions take turns, one of them on its route."""
    import torch

    engine = Engine(devices=2)
    traveller, resident = engine.dynamic(), engine.dynamic()
    seen = stayed = None
    for device in ROUTE:
        for layer in traveller.layers:
            layer.device = torch.device(f"vgpu:{device}")
            layer.prefetch()
        seen = engine.turn("traveller", traveller, seen, device)
        stayed = engine.turn("resident", resident, stayed)
    observer.record()
    said: dict[str, Any] = {}
    for metric, what in (("kvobs.migration.operations", "buffers"), ("kvobs.migration.io", "bytes"),
                         ("kvobs.device.copy.operations", "device's own copies"),
                         ("kvobs.device.copy.io", "device's own bytes")):
        for point in observer.points(metric):
            said[f"{what} {point.attributes['src']} to {point.attributes['dst']}"] = int(point.value)
    said["devices by turn"] = [stored.record.origin.device for stored in observer.reader().turns(session="traveller")]
    buffers = sum(said.get(f"buffers vgpu:{src} to vgpu:{dst}", 0) for src, dst in PAIRS)
    return Played(said, f"{buffers} K and V buffers changed device.", (engine, traveller, resident))
