"""What the pages share: states without data, pickers, a chart or its absence."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import streamlit as st

from kvobs.model import Availability
from kvobs.store import Stored, StoreError
from streamlit_app import data, processes, units

ALL = "all"
COLUMNS = 5
Option = TypeVar("Option", bound=Hashable)


class Aged(Protocol):
    """What a page shows, by how old it is and whose it is; the fields are those of ``data.Live``."""

    @property
    def age_s(self) -> float | None: ...
    @property
    def running(self) -> bool: ...
    @property
    def chosen(self) -> int: ...
    @property
    def told(self) -> int: ...
    @property
    def stale(self) -> list[str]: ...


def guarded(draw: Callable[..., None]) -> Callable[..., None]:
    """A page that has nothing to show, or cannot read its store, says so instead of failing."""

    @functools.wraps(draw)
    def page(*arguments: Any) -> None:
        try:
            draw(*arguments)
        except data.NothingYet as nothing:
            st.info(units.plain(str(nothing)))
            if nothing.command:  # as code: Markdown would make a dash of its two hyphens
                st.code(nothing.command, language=None)
        except StoreError as error:
            st.error(units.plain(str(error)))

    return page


def watch(look: Callable[[], object]) -> None:
    """Draw the whole page anew when ``look`` says something else than now: a process began, a session was added."""
    _watch(look, look())


@st.fragment(run_every=1.0)
def _watch(look: Callable[[], object], seen: object) -> None:
    if look() != seen:
        st.rerun()


def pick(label: str, names: Mapping[Option, str], memory: str, lead: Option | None = None) -> Option:
    """Let the user choose; the choice outlives new names, a new order and a visit to another page.

    ``names`` must not be empty; its first entry is what stands until something is chosen, or else ``lead``, even where
    it joined later: an engine's core starts after its API server.
    """
    options, labels = list(names), distinct(names)
    # Streamlit knows a choice by its words. A new option may join the list that a user has open; another name for a
    # known one needs a new widget.
    shown, number = st.session_state.get(f"{memory}-shown", ({}, 0))
    if any(labels.get(option, name) != name for option, name in shown.items()):
        st.session_state[memory] = st.session_state.get(f"{memory}-{number}", st.session_state.get(memory))
        number += 1
    if lead is not None and not st.session_state.get(f"{memory}-made") and st.session_state.get(memory, lead) != lead:
        st.session_state[memory] = lead
        number += 1
    st.session_state[f"{memory}-shown"] = labels, number
    key = f"{memory}-{number}"
    if key not in st.session_state and st.session_state.get(memory) in names:
        st.session_state[key] = st.session_state[memory]
    chosen: Option = st.sidebar.selectbox(label, options, key=key, format_func=lambda one: labels.get(one, ""),
                                          on_change=_made, args=(memory,))
    st.session_state[memory] = chosen
    return chosen


def _made(memory: str) -> None:
    st.session_state[f"{memory}-made"] = True  # by the user, so that no process that joins takes its place


def distinct(names: Mapping[Option, str]) -> dict[Option, str]:
    """The same names, numbered where two are equal: Streamlit tells options apart by what they say."""
    seen: collections.Counter[str] = collections.Counter()
    told: dict[Option, str] = {}
    for option, name in names.items():
        seen[name] += 1
        told[option] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return told


def pick_process(store: str) -> str | None:
    """Let the user choose a process of the store, or all; returns its id or None.

    Raises:
        NothingYet, StoreError: as ``data.open_store``.
    """
    reader = data.open_store(store)
    of, found = processes.known(store, reader), reader.processes()
    names = processes.names(found, of)
    cores = [one.process for one in processes.ordered(found, of)[:1]
             if one.alive and one.process in of and of[one.process].role == processes.CORE]
    if len(names) > 1:
        names[ALL] = f"All {len(names)} processes"
    chosen = pick("Process", names, "process", cores[0] if cores else None)
    return None if chosen == ALL else chosen


def chart(drawn: Any, absent: str) -> None:
    """A chart, or one sentence that says why there is none."""
    if drawn is None:
        st.caption(absent)
    else:
        st.altair_chart(drawn, width="stretch")


def staleness(found: Aged) -> None:
    """Say so, visibly, when what is shown is not now."""
    with st.container(key="state"):
        if found.age_s is None:
            st.warning("No sample has been written yet." if found.running
                       else "The process ended before its first sample.")
        elif not found.running:
            ended = "The process has ended" if found.chosen == 1 else "The chosen processes have ended"
            st.warning(f"{ended}: everything below is as of {units.seconds(found.age_s)} ago.")
        elif found.age_s > data.STALE_S:
            st.warning(f"Stale: the last sample is {units.seconds(found.age_s)} old, although the process is running.")
        elif found.stale:
            st.warning("Stale in part: these run but have not written for more than "
                       f"{units.seconds(data.STALE_S)}: {units.plain(', '.join(found.stale))}.")
        else:
            st.success(f"Live: the last sample is {units.seconds(max(found.age_s, 0.0))} old.")
        if found.told < found.chosen:
            st.caption(f"The figures are of {found.told} of {found.chosen} processes: what an ended one held is held "
                       "no more.")


def strip(figures: Sequence[data.Figure], columns: int = COLUMNS) -> None:
    """Numbers beside each other, each with the very number and its age below; what does not fit goes on below."""
    for start in range(0, len(figures), columns):
        for column, figure in zip(st.columns(columns), figures[start:start + columns], strict=False):
            with column, st.container(key=f"figure-{figure.key}"):
                st.metric(figure.label, figure.text, help=figure.help)
                st.caption(figure.raw if figure.age_s is None else f"{figure.raw} · {max(figure.age_s, 0):.1f} s ago")


def facts(found: Iterable[Stored[Availability]], names: Mapping[str, str]) -> None:
    """What can be seen here and what not, and why; ``names`` of the processes where there are several."""
    st.subheader("What can be seen here, and what not")
    ordered = sorted(found, key=lambda fact: (fact.record.available, fact.record.subject, fact.process))
    if ordered:
        st.table([{"subject": units.plain(fact.record.subject), "seen": "yes" if fact.record.available else "no",
                   "why": units.plain(fact.record.reason),
                   **({"process": units.plain(names[fact.process])} if names else {})} for fact in ordered],
                 hide_index=True)
    else:
        st.caption("Nothing was reported yet.")
