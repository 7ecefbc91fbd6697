"""Requests: who is in a serving engine, who holds its pool of KV blocks, why someone waits, and how it went."""

from __future__ import annotations

import functools

import streamlit as st

from streamlit_app import requests_chart, requests_data, requests_words, units
from streamlit_app.views import _common

RANGES: dict[str, float] = {"1 min": 60, "5 min": 300, "15 min": 900, "1 h": 3600}
TABLE = 420  # pixels
# Widths in pixels: at 1280 all but whole ids and sentences is in sight. What a column is called is short, too.
WIDTHS = {"request": 142, "session": 62, "state": 120, "for": 50, "blocks": 54, "prompt": 56, "cached": 58,
          "computed": 74, "new": 44, "lost": 42, "open for": 64, "priority": 76, "whole id": 330, "waits because": 420,
          "when (UTC)": 98, "victim": 146, "for whom": 146, "tokens lost": 84, "cause": 172, "victim's whole id": 330,
          "whole id of whom": 330, "held then": 600}
HELP = {"cached": "Tokens of the prompt that the prefix cache had.", "new": "Tokens that were generated.",
        "lost": "How often it was preempted, which is to lose all its blocks.", "request": "Shortened; the whole id is "
        "in a column further right.", "victim": "Shortened; the whole id is in a column further right.",
        "blocks": "An open request holds them; a victim gave them back.", "for": "How long it has been in this state.",
        "open for": "How long it has been in the engine."}
TOP = 24  # characters of a request in running text


def render(store: str) -> None:
    """The page: a pool and a range, then what refreshes itself every two seconds."""
    st.header("Requests")
    _common.watch(functools.partial(requests_data.engines_seen, store))
    _page(store)


@_common.guarded
def _page(store: str) -> None:
    names = requests_data.engines(store)
    key = _common.pick("Engine", names, "engine")
    reach = st.sidebar.radio("Range", list(RANGES), index=1, key="requests-range", horizontal=True)
    _fresh(store, key, reach)


@st.fragment(run_every=2.0)
def _fresh(store: str, key: requests_data.Key, reach: str) -> None:
    _draw(store, key, reach)


@_common.guarded
def _draw(store: str, key: requests_data.Key, reach: str) -> None:
    found = requests_data.requests(store, key, RANGES[reach])
    st.caption(units.plain(" · ".join(filter(None, (found.origin.model, found.origin.cache, found.origin.device,
                                                    found.origin.dtype)))))
    _state(found)
    with st.container(key="strip-requests"):
        shown = requests_words.figures(found, reach)
        _common.strip(shown, len(shown))
    _pool(found)
    _waiting(found)
    _timeline(found, reach)
    _open(found)
    _preemptions(found, reach)
    _common.facts(found.facts, {})


def _state(found: requests_data.Requests) -> None:
    if worry := requests_words.worry(found):
        with st.container(key="state"):
            st.warning(worry)
    else:
        _common.staleness(found)
    if found.gone:
        st.warning("The engine has freed this pool: everything below is of the past.")
    elif told := requests_words.telling(found):
        st.caption(told)
    if wrong := requests_words.sound(found):
        st.error(wrong)


def _pool(found: requests_data.Requests) -> None:
    st.subheader("Who holds the pool")
    if found.pool is None:
        st.caption("The pool has not told of its blocks yet.")
        return
    pool, states = found.pool.record, found.states
    rows = states.record.rows if states is not None else ()
    kept = st.session_state.setdefault("requests-sessions", {})
    sessions = kept[found.key] = requests_chart.sessions_of(rows, kept.get(found.key, ()))
    bars = requests_chart.parts(pool, found.work.record if found.work else None, rows, sessions)
    _common.chart(requests_chart.pool_bars(bars, sessions, pool.block_bytes), "The pool has no block.")
    for sentence in requests_words.account(found):
        st.caption(sentence)


def _waiting(found: requests_data.Requests) -> None:
    st.subheader("Why requests wait")
    if found.states is None:
        st.caption("This pool does not tell which requests are in its engine.")
        return
    states = found.states.record
    sentences = requests_words.waiting(states)
    st.markdown("\n".join(f"- {units.plain(one)}" for one in sentences) or requests_words.none_waits(found))
    if states.next_request:
        with st.container(key="next"):
            st.markdown(f"Next, estimated: {units.plain(states.next_request[:TOP])}: "
                        f"**{units.plain(states.next_verdict or 'no verdict')}**. {requests_words.next_one(states)}")


def _timeline(found: requests_data.Requests, reach: str) -> None:
    st.subheader("Requests over time")
    _common.chart(requests_chart.gantt(found.timeline, found.states.record.slots if found.states else 0),
                  f"No request was told of in the last {reach}.")
    for sentence in requests_words.drawn(found):
        st.caption(sentence)


def _open(found: requests_data.Requests) -> None:
    if found.states is None:
        return
    states = found.states.record
    st.subheader("Open requests")
    _table(requests_words.open_rows(found.states, found.now_ns if found.running else None), "No request is open.")
    if states.more:
        st.caption(f"{states.more:,} more are not listed: neither those that hold most blocks nor the next in line.")


def _preemptions(found: requests_data.Requests, reach: str) -> None:
    st.subheader("Preemptions")
    _table(requests_words.preemption_rows(found.preemptions), f"None was told of in the last {reach}.")
    if (many := requests_words.preempted(found)) > len(found.preemptions):
        st.caption(f"The newest {len(found.preemptions):,} of {many:,} in the last {reach}.")


def _table(rows: list[dict[str, object]], none: str) -> None:
    if rows:
        wide = {name: st.column_config.Column(width=WIDTHS.get(name), help=HELP.get(name)) for name in rows[0]}
        st.dataframe(rows, hide_index=True, width="stretch", column_config=wide,
                     height=min(TABLE, 35 * (len(rows) + 1) + 3))
    else:
        st.caption(none)
