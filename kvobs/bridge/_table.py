"""The mapping table: which metric of which engine means which row of the catalog. Data, in ``engines.toml``.

A table is TOML: ``version = 1`` and one ``[[engine]]`` per engine and part of it, with its rows. A row names the
samples (``names``, or ``histogram`` for the sum and count of one) under every name that versions gave them, newest
first: of these the first that an answer has is used. ``attributes`` are fixed, ``labels`` are read from the engine's
labels, ``where`` keeps only samples with these labels, ``unit`` names the engine's unit where it is not the catalog's,
``value_label`` names a label whose number is the value.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

import msgspec

from kvobs.catalog import BY_NAME, Row

VERSION = 1
# Of the engines' units, by what a value is multiplied with and divided by: exact, each of them once rounded.
UNITS = {"": (1, 1), "ms": (1, 1000), "MiB": (1024**2, 1), "GiB": (1024**3, 1), "percent": (1, 100)}
_UNIT_OF = {"ms": "s", "MiB": "By", "GiB": "By", "percent": "1"}
WHO = ("engine", "target", "model", "ranks")


class TableError(ValueError):
    """A table was refused; ``str()`` is one whole sentence."""


class Mapping(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the table. ``since`` and ``until`` are the engine's versions, where known."""

    row: str = ""
    names: tuple[str, ...] = ()
    histogram: tuple[str, ...] = ()
    sum: str = ""
    count: str = ""
    attributes: dict[str, str] = {}
    labels: dict[str, str] = {}
    where: dict[str, str] = {}
    unit: str = ""
    value_label: str = ""
    since: str = ""
    until: str = ""


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine's samples have in common: who says so, the labels of its model and ranks, and its rows.

    ``where`` holds for all of its rows; a label that is missing counts as empty. ``settled`` says that a page names all
    of its models and ranks from the beginning on, so that samples without them are of the only ones where it has one.
    """

    name: str
    source: str
    model: str = "model_name"
    ranks: dict[str, str] = {}
    where: dict[str, str] = {}
    settled: bool = False
    rows: tuple[Mapping, ...]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole table."""

    version: int
    engine: tuple[Engine, ...]


class Rule(msgspec.Struct, frozen=True):
    """One row of the table, ready to be applied; ``names`` are canonical, ``scale`` is one of ``UNITS``."""

    engine: Engine
    row: Row
    names: tuple[str, ...]
    mapping: Mapping
    where: dict[str, str]
    scale: tuple[int, int]


def canonical(name: str) -> str:
    """One spelling of a sample's name: Ray and OpenTelemetry write ``_`` for the colon, Ray puts ``ray_`` before."""
    return name.removeprefix("ray_").replace(":", "_", 1)


@functools.cache
def built_in() -> tuple[Rule, ...]:
    """The table that kvobs comes with."""
    return rules(files("kvobs.bridge").joinpath("engines.toml").read_text(encoding="utf-8"), "engines.toml")


def with_file(path: Path | None) -> tuple[Rule, ...]:
    """The rules of a file before the built-in ones.

    Raises:
        TableError: the file cannot be read or is not a table.
    """
    if path is None:
        return built_in()
    try:
        return rules(path.read_text(encoding="utf-8"), str(path)) + built_in()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise TableError(f"The mapping table {path} cannot be read ({reason.lower()}).") from None


def rules(text: str, where: str) -> tuple[Rule, ...]:
    """The rules of a table's text.

    Raises:
        TableError: one sentence that says what is wrong and where.
    """
    try:
        table = msgspec.convert(tomllib.loads(text), Table)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise TableError(f"The mapping table {where} is not one ({error}).") from None
    if table.version != VERSION:
        raise TableError(f"The mapping table {where} has version {table.version}; this kvobs reads version {VERSION}.")
    found: list[Rule] = []
    for engine in table.engine:
        for at, mapping in enumerate(engine.rows, 1):
            try:
                found += _rules_of(engine, mapping)
            except TableError as error:
                raise TableError(f"Row {at} of engine {engine.name!r} in {where} {error}.") from None
    return tuple(found)


def _rules_of(engine: Engine, mapping: Mapping) -> Iterable[Rule]:
    if mapping.histogram:
        if mapping.row or mapping.names or not (mapping.sum or mapping.count):
            raise TableError("maps a histogram, so it needs sum or count (rows of the catalog), and no row or names")
        for end, row in (("_sum", mapping.sum), ("_count", mapping.count)):
            if row:
                names = tuple(name + end for name in mapping.histogram)
                yield _rule(engine, mapping, row, names, mapping.unit if end == "_sum" else "")
    else:
        yield _rule(engine, mapping, mapping.row, mapping.names, mapping.unit)


def _rule(engine: Engine, mapping: Mapping, name: str, names: tuple[str, ...], unit: str) -> Rule:
    row = BY_NAME.get(name)
    if row is None or row.nature != "scraped" or row.kind == "histogram":
        raise TableError(f"names {name!r}, which is no scraped row of the catalog")
    if not names or not all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", one) for one in names):
        raise TableError("needs names that metrics can have")
    given, own = {*mapping.attributes, *mapping.labels}, set(row.attributes) - set(WHO)
    if given != own or len(given) != len(mapping.attributes) + len(mapping.labels):
        raise TableError(f"must give each of these attributes once: {', '.join(sorted(own)) or 'none'}")
    if unit not in UNITS or (unit and row.unit != _UNIT_OF[unit]):
        raise TableError(f"has the unit {unit!r}, which is not one that becomes {row.unit!r}")
    return Rule(engine, row, tuple(map(canonical, names)), mapping, engine.where | mapping.where, UNITS[unit])

