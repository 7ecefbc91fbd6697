"""Breaker: which level holds, what was decided and why, what it did, and what another policy would have done."""

from __future__ import annotations

import functools

import streamlit as st

from kvobs.breaker import PRESETS, PolicyError, load_policy, parse_policy
from streamlit_app import breaker_chart, breaker_data, breaker_words, units
from streamlit_app.views import _common

RANGES: dict[str, float] = {"5 min": 300, "15 min": 900, "1 h": 3600, "6 h": 21600}
TABLE = 420  # pixels
OWN = "a policy of your own"
WIDTHS = {"when (UTC)": 85, "scope": 90, "level": 105, "change": 140, "reason": 235, "effect": 420, "signals": 200,
          "not done instead": 300}


def render(store: str) -> None:
    """The page: a process and a range, then what refreshes itself every two seconds, then a replay on request."""
    st.header("Breaker")
    _common.watch(functools.partial(_seen, store))
    _page(store)


def _seen(store: str) -> object:
    try:
        return breaker_data.with_breaker(store)
    except Exception:  # told by the page itself
        return None


@_common.guarded
def _page(store: str) -> None:
    process = _common.pick("Process", breaker_data.with_breaker(store), "breaker-process")
    reach = st.sidebar.radio("Range", list(RANGES), index=1, key="breaker-range", horizontal=True)
    _fresh(store, process, reach)
    _replay(store, process, reach)


@st.fragment(run_every=2.0)
def _fresh(store: str, process: str, reach: str) -> None:
    _draw(store, process, reach)


@_common.guarded
def _draw(store: str, process: str, reach: str) -> None:
    found = breaker_data.breaker(store, process, RANGES[reach])
    _common.staleness(found)
    st.caption(units.plain(f"Policy: {found.policy or 'not told yet.'}"))
    with st.container(key="strip-breaker"):
        _common.strip(breaker_words.figures(found, reach))
    st.subheader("Levels over time")
    _common.chart(breaker_chart.timeline(found.spans, found.decisions, found.begin_ns, found.end_ns),
                  f"No level was told of in the last {reach}.")
    st.subheader("Objectives")
    _table(breaker_words.objective_rows(found.standings), "No objective has judged an event yet.")
    if found.standings:
        st.caption("A burn rate of 1 spends the error budget just in time. Alerts fire above 14.4 (5m and 1h), 6 (30m "
                   "and 6h), 3 (2h and 1d) and 1 (6h and 3d).")
    st.subheader("Decisions")
    _table(breaker_words.decision_rows(found), f"Nothing was decided in the last {reach}.")
    if len(found.decisions) > breaker_words.MOST:
        st.caption(f"The newest {breaker_words.MOST:,} of {len(found.decisions):,}; kvobs breaker log tells all.")
    st.subheader("Actions")
    _table(breaker_words.action_rows([one.record for one in found.actions]),
           "Nothing is ordered in this mode." if found.mode != "act" else f"Nothing was ordered in the last {reach}.")
    _common.facts(found.facts, {})


@_common.guarded
def _replay(store: str, process: str, reach: str) -> None:
    st.subheader("In hindsight")
    if st.button("Judge what was decided", key="breaker-judge"):
        st.session_state["breaker-judged"] = process, breaker_data.judged(store, process)
    judged_of, judged = st.session_state.get("breaker-judged", ("", None))
    if judged is not None and judged_of == process:
        mode = breaker_data.breaker(store, process, RANGES[reach]).mode
        st.markdown("\n".join(f"- {units.plain(one)}" for one in breaker_words.hindsight(judged, mode)))
    st.subheader("With another policy")
    picked = st.selectbox("Policy", [*PRESETS, OWN], key="breaker-policy")
    text = st.text_area("TOML", key="breaker-toml", height=200) if picked == OWN else ""
    if st.button("Replay", key="breaker-replay"):
        try:
            policy = parse_policy(text, "given here") if picked == OWN else load_policy(picked)
        except PolicyError as error:
            st.error(units.plain(str(error)))
            return
        st.session_state["breaker-replayed"] = process, breaker_data.replay(store, process, policy), policy
    replayed_of, replayed, policy_of = st.session_state.get("breaker-replayed", ("", None, None))
    if replayed is None or replayed_of != process:
        return
    found = breaker_data.breaker(store, process, RANGES[reach])
    since = min((one.begin_ns for one in found.spans), default=found.begin_ns)
    spans = breaker_chart.replayed_spans(f"replay: {replayed.policy}", replayed, since, found.end_ns)
    _common.chart(breaker_chart.timeline([*found.spans, *spans], [], found.begin_ns, found.end_ns),
                  f"No level was told of in the last {reach}.")
    st.caption(units.plain(breaker_words.replay(replayed, policy_of, found.decisions)))


def _table(rows: list[dict[str, object]], none: str) -> None:
    if rows:
        wide = {name: st.column_config.Column(width=WIDTHS.get(name)) for name in rows[0]}
        st.dataframe(rows, hide_index=True, width="stretch", column_config=wide,
                     height=min(TABLE, 35 * (len(rows) + 1) + 3))
    else:
        st.caption(none)
