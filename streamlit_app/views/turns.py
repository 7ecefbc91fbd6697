"""Turns: the article's two tables (S5, S6) for a session, as it really was."""

from __future__ import annotations

from typing import Any

import streamlit as st

from kvobs import config
from kvobs.analysis import article_fragmentation_rate, write_amplification
from kvobs.model import Turn
from streamlit_app import charts, data, units
from streamlit_app.views import _common

ARTICLE = [
    {"turn": 1, "re-allocations": 0, "migrations": "0 %", "fragmentation": ""},
    {"turn": 3, "re-allocations": 2, "migrations": "100 %", "fragmentation": ""},
    {"turn": 5, "re-allocations": 7, "migrations": "57 %", "fragmentation": ""},
    {"turn": 6, "re-allocations": None, "migrations": "", "fragmentation": "21.3 % (12,480 and 9,824 MiB)"},
    {"turn": 7, "re-allocations": None, "migrations": "", "fragmentation": "60.0 % (13,120 and 5,248 MiB)"},
]
NOTE = ("The article's figures are of one deployment. With a dynamic cache every forward pass re-allocates K and V of "
        "every layer, and with a static cache none does. The article's fragmentation rate over KV buffers tells how "
        "many buffers there are, not how much is wasted.")
SHOWN = 500


def render(store: str) -> None:
    """The page: a session, its chart and its tables."""
    st.header("Turns")
    _page(store)


@_common.guarded
def _page(store: str) -> None:
    found, processes = data.sessions(store)
    several = len({fact.process for fact in found}) > 1

    def name(index: int) -> str:
        fact = found[index]
        words = " ".join(fact.session.split())[:60] or "(no name)"
        process = f" · {data.name_of(processes[fact.process])}" if several and fact.process in processes else ""
        return f"{words} · {fact.turns} turns{process}"

    chosen = st.sidebar.selectbox("Session", range(len(found)), format_func=name, key="turns-session")
    _fresh(store, found[chosen].process, found[chosen].session)
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
    st.subheader("KV memory by turn (S5)")
    st.table([sizes(turn) for turn in turns], hide_index=True)
    st.subheader("Re-allocations and migrations by turn (S6)")
    st.table([work(turn) for turn in turns], hide_index=True)
    address = config.load().jaeger_url
    with st.container(key="traces"):
        for turn in turns[-10:]:
            if turn.trace_id and address:
                st.markdown(f"[Trace of turn {turn.turn}]({address}/trace/{turn.trace_id})")
            elif turn.trace_id:
                st.caption(f"Trace of turn {turn.turn}: {turn.trace_id}")


def sizes(turn: Turn) -> dict[str, Any]:
    """A turn's line of the first table."""
    rate = article_fragmentation_rate(turn.kv_reserved_bytes, turn.kv_largest_bytes)
    return {"turn": turn.turn, "prompt": turn.prompt_tokens, "of it cached": turn.cached_tokens,
            "new": turn.new_tokens, "KV held": f"{turn.kv_bytes:,} B", "reserved": f"{turn.kv_reserved_bytes:,} B",
            "largest buffer": f"{turn.kv_largest_bytes:,} B",
            "fragmentation (article)": "absent" if rate is None else units.share(rate), "outcome": turn.outcome}


def work(turn: Turn) -> dict[str, Any]:
    """A turn's line of the second table."""
    moved = sum(count for _, _, count, _ in turn.migrations)
    changed = turn.reallocations + moved
    amplification = write_amplification(turn.bytes_written, turn.bytes_copied)
    return {"turn": turn.turn, "re-allocations": turn.reallocations, "migrations": moved,
            "share across devices": units.share(moved / changed) if changed else "absent",
            "written": units.size(turn.bytes_written), "copied again": units.size(turn.bytes_copied),
            "copied / written": None if amplification is None else round(amplification - 1, 1),
            "TTFT": "absent" if turn.ttft_ns is None else units.seconds(turn.ttft_ns / 1e9),
            "per token": "absent" if turn.tpot_ns is None else units.seconds(turn.tpot_ns / 1e9)}
