"""Turns: the article's two tables (S5, S6) for a session, as it really was."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import quote

import streamlit as st

from kvobs import config
from kvobs.analysis import article_fragmentation_rate, write_amplification
from kvobs.model import Turn
from streamlit_app import charts, data, processes, units
from streamlit_app.views import _common

ARTICLE = [
    {"turn": 1, "re-allocations": "0", "migrations": "0 %", "fragmentation": ""},
    {"turn": 3, "re-allocations": "2", "migrations": "100 %", "fragmentation": ""},
    {"turn": 5, "re-allocations": "7", "migrations": "57 %", "fragmentation": ""},
    {"turn": 6, "re-allocations": "", "migrations": "", "fragmentation": "21.3 % (12,480 and 9,824 MiB)"},
    {"turn": 7, "re-allocations": "", "migrations": "", "fragmentation": "60.0 % (13,120 and 5,248 MiB)"},
]
NOTE = ("The article's figures are of one deployment. With a dynamic cache every forward pass re-allocates K and V of "
        "every layer, and with a static cache none does. The article's fragmentation rate over KV buffers tells how "
        "many buffers there are, not how much is wasted.")
OWN_SIZES = ("reserved", "largest buffer", "fragmentation (article)")
OWN_WORK = ("re-allocations", "migrations", "share across devices", "copied again", "copied / written")
SHARED = ("Requests of this engine share one pool of KV blocks, which neither grows nor moves with them: so there "
          "is no slack, largest buffer, fragmentation, re-allocation or migration of a request to tell. Who holds the "
          "pool is on the page Requests.")
SHOWN = 500


def render(store: str) -> None:
    """The page: a session, its chart and its tables."""
    st.header("Turns")
    _common.watch(functools.partial(data.sessions_seen, store))
    _page(store)


@_common.guarded
def _page(store: str) -> None:
    found, known = data.sessions(store)
    several = len({fact.process for fact in found}) > 1
    owners = processes.names(known.values(), processes.known(store, data.open_store(store))) if several else {}
    names = {}
    for fact in found:
        words = " ".join(fact.session.split())[:60] or "(no name)"
        owner = f" · {owners[fact.process]}" if fact.process in owners else ""
        names[fact.process, fact.session] = f"{words}{owner}"
    if len(found) == data.SESSIONS:
        st.sidebar.caption(f"The {data.SESSIONS} sessions that were heard of last.")
    _fresh(store, *_common.pick("Session", names, "session"))
    with st.expander("The article's figures, and why these differ"):
        st.table(ARTICLE, hide_index=True)
        st.write(NOTE)


@st.fragment(run_every=2.0)
def _fresh(store: str, process: str, session: str) -> None:
    _draw(store, process, session)


@_common.guarded
def _draw(store: str, process: str, session: str) -> None:
    turns = [stored.record for stored in data.open_store(store).turns(session) if stored.process == process]
    if len(turns) > SHOWN:
        st.caption(f"The last {SHOWN} of {len(turns)} turns.")
    turns = turns[-SHOWN:]
    if not turns:
        st.info("This session's turns have been deleted from the store meanwhile.")
        return
    st.altair_chart(charts.turns(turns), width="stretch")
    pooled = {charts.shares_pool(turn) for turn in turns}
    if True in pooled:
        st.caption(SHARED)
    st.subheader("KV memory by turn (S5)")
    st.table([told(sizes(turn), OWN_SIZES, turn, pooled) for turn in turns], hide_index=True)
    st.subheader("Time by turn" if False not in pooled else "Re-allocations and migrations by turn (S6)")
    st.table([told(work(turn), OWN_WORK, turn, pooled) for turn in turns], hide_index=True)
    address = config.load().jaeger_url
    traced = [turn for turn in turns if turn.trace_id]
    with st.container(key="traces"):
        if traced and address:
            st.markdown(" · ".join(f"[Trace of turn {turn.turn}]({address}/trace/{quote(turn.trace_id)})"
                                   for turn in traced))
        elif traced:
            st.caption(" · ".join(f"Trace of turn {turn.turn}: {units.plain(turn.trace_id)}" for turn in traced))


def told(row: dict[str, Any], own: tuple[str, ...], turn: Turn, pooled: set[bool]) -> dict[str, Any]:
    """A line without what a request in a shared pool has no ``own`` of; absent where other turns have it.

    Cells of such a column are words then: Streamlit has no column of numbers and words.
    """
    if True not in pooled:
        return row
    if False not in pooled:
        return {name: cell for name, cell in row.items() if name not in own}
    return {name: cell if name not in own else "absent" if charts.shares_pool(turn) else str(cell)
            for name, cell in row.items()}


def sizes(turn: Turn) -> dict[str, Any]:
    """A turn's line of the first table."""
    rate = article_fragmentation_rate(turn.kv_reserved_bytes, turn.kv_largest_bytes)
    return {"turn": turn.turn, "prompt": turn.prompt_tokens, "of it cached": turn.cached_tokens,
            "new": turn.new_tokens, "KV held": f"{turn.kv_bytes:,} B", "reserved": f"{turn.kv_reserved_bytes:,} B",
            "largest buffer": f"{turn.kv_largest_bytes:,} B",
            "fragmentation (article)": "absent" if rate is None else units.share(rate),
            "outcome": units.plain(turn.outcome)}


def work(turn: Turn) -> dict[str, Any]:
    """A turn's line of the second table."""
    moved = sum(count for _, _, count, _ in turn.migrations)
    changed = turn.reallocations + moved
    amplification = write_amplification(turn.bytes_written, turn.bytes_copied)
    return {"turn": turn.turn, "re-allocations": turn.reallocations, "migrations": moved,
            "share across devices": units.share(moved / changed) if changed else "absent",
            "written": units.size(turn.bytes_written), "copied again": units.size(turn.bytes_copied),
            "copied / written": "absent" if amplification is None else f"{amplification - 1:.1f}",
            "TTFT": "absent" if turn.ttft_ns is None else units.seconds(turn.ttft_ns / 1e9),
            "per token": "absent" if turn.tpot_ns is None else units.seconds(turn.tpot_ns / 1e9)}
