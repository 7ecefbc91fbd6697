"""The event model: inert, immutable, complete."""

from __future__ import annotations

import gc
import typing

import msgspec
import pytest

from kvobs import metrics, model
from tests.events import EXAMPLES

EVENTS = typing.get_args(model.Event)


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_events_are_immutable_and_invisible_to_the_garbage_collector(event: model.Event) -> None:
    """No field of an event can be assigned, and the collector never has to walk it."""
    field = msgspec.structs.fields(event)[0].name
    with pytest.raises(AttributeError, match="immutable"):
        setattr(event, field, 0)
    assert not gc.is_tracked(event)


def test_every_event_type_has_an_example_and_a_fold() -> None:
    """The union, the fold and these tests know the same types: a new event cannot be forgotten in one of them."""
    assert {type(event) for event in EXAMPLES} == set(EVENTS)
    assert set(metrics.FOLDERS) == set(EVENTS)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_fields_say_their_units(event: type[msgspec.Struct]) -> None:
    """Integer times are nanoseconds and sizes are bytes, and the names say so."""
    for field in msgspec.structs.fields(event):
        words = field.name.split("_")
        for unit in ("ms", "us", "s", "mb", "kb", "mib", "kib"):
            assert unit not in words, f"{event.__name__}.{field.name}"
        if {"t", "start", "duration", "latency", "hook", "ttft", "tpot", "prefill"} & set(words) and field.type in (
                int, int | None):
            assert words[-1] == "ns", f"{event.__name__}.{field.name}"


@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_events_survive_a_round_trip_through_json(event: model.Event) -> None:
    """An event holds only plain data: encoding and decoding gives an equal event."""
    assert msgspec.json.decode(msgspec.json.encode(event), type=type(event)) == event
