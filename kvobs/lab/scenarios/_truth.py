"""What is true of a scenario, what kvobs said of it, and whether the two agree."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvobs.lab.demo._observer import Observer

_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {"=": operator.eq, ">=": operator.ge, "<=": operator.le}


class Expected(NamedTuple):
    """One thing that is known beforehand. ``name`` has its unit in it; ``relation`` (=, >= or <=) is the one in which
    what is said stands to ``value``, which is JSON; ``because`` says where it is known from.
    """

    name: str
    value: Any
    because: str
    relation: str = "="


class Truth(NamedTuple):
    """What happens in a scenario, in a sentence, and what is known of it as data."""

    scenario: str
    happens: str
    expected: tuple[Expected, ...]

    def value(self, name: str) -> Any:
        """The known value of that name.

        Raises:
            KeyError: there is none.
        """
        for one in self.expected:
            if one.name == name:
                return one.value
        raise KeyError(name)


class Played(NamedTuple):
    """What kvobs said, by the names of the truth, in ``sentence`` in its own words; ``alive`` is what must live on
    while metrics are served.
    """

    said: Mapping[str, Any]
    sentence: str
    alive: tuple[object, ...] = ()


class Scenario(NamedTuple):
    """Its truth, the memory of its virtual devices in bytes, and what plays it on them, observed."""

    truth: Truth
    devices: tuple[int, ...]
    play: Callable[[Observer], Played]


class Claim(NamedTuple):
    """An expectation, what kvobs said (None for nothing), and whether that agrees."""

    expected: Expected
    said: Any
    agrees: bool


def claims(truth: Truth, said: Mapping[str, Any]) -> list[Claim]:
    """Every expectation beside what was said; what was not said does not agree, unless nothing was expected."""
    found = []
    for one in truth.expected:
        value = said.get(one.name)
        agrees = one.name in said and (value == one.value if one.relation == "=" else
                                       value is not None and _RELATIONS[one.relation](value, one.value))
        found.append(Claim(one, value, agrees))
    return found
