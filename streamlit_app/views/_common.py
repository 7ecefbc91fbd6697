"""What the pages share: states without data, the process picker, a chart or its absence."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from kvobs.store import Process, StoreError
from streamlit_app import data, units

ALL = "all"


def guarded(draw: Callable[..., None]) -> Callable[..., None]:
    """A page that has nothing to show, or cannot read its store, says so instead of failing."""

    @functools.wraps(draw)
    def page(*arguments: Any) -> None:
        try:
            draw(*arguments)
        except data.NothingYet as nothing:
            st.info(str(nothing))
        except StoreError as error:
            st.error(str(error))

    return page


def pick_process(store: str, key: str) -> str | None:
    """Let the user choose a process of the store, or all; returns its id or None.

    Raises:
        NothingYet, StoreError: as ``data.open_store``.
    """
    processes = data.newest_first(data.open_store(store).processes())
    names = {found.process: data.name_of(found) for found in processes}
    options = [*names, *([ALL] if len(names) > 1 else [])]
    chosen = st.sidebar.selectbox("Process", options, key=key,
                                  format_func=lambda one: names.get(one, f"All {len(names)} processes"))
    return None if chosen == ALL else chosen


def chart(drawn: Any, absent: str) -> None:
    """A chart, or one sentence that says why there is none."""
    if drawn is None:
        st.caption(absent)
    else:
        st.altair_chart(drawn, width="stretch")


def staleness(age_s: float | None, running: bool, processes: Sequence[Process]) -> None:
    """Say so, visibly, when what is shown is not now."""
    with st.container(key="state"):
        if age_s is None:
            st.warning("No sample has been written yet." if running else "The process ended before its first sample.")
        elif not running:
            ended = "The process has ended" if len(processes) == 1 else "The chosen processes have ended"
            st.warning(f"{ended}: everything below is as of {units.seconds(age_s)} ago.")
        elif age_s > data.STALE_S:
            st.warning(f"Stale: the last sample is {units.seconds(age_s)} old, although the process is running.")
        else:
            st.success(f"Live: the last sample is {units.seconds(max(age_s, 0.0))} old.")
