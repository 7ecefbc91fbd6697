"""Attention: who in the cache is still read (S4), and how near (S7)."""

from __future__ import annotations

import functools
import time
from typing import Any

import streamlit as st

from kvobs.store import AttentionSecond, Stored
from streamlit_app import charts, data, processes, units
from streamlit_app.views import _common

RULE = ("Pending evict is the article's rule: the largest attention score of a block stayed below 0.08 in three "
        "consecutive steps. In long contexts nearly every block satisfies it, since the scores of many tokens sum to "
        "one: it says what the rule would evict, not what can be lost without harm.")


def render(store: str) -> None:
    """The page: a process, a cache, and its sampled attention over tokens or time."""
    st.header("Attention")
    _common.watch(functools.partial(data.processes_seen, store))
    _page(store)


@_common.guarded
def _page(store: str) -> None:
    chosen = _common.pick_process(store)
    if engine := processes.engine_of(store, chosen):
        st.info(f"Attention is sampled in transformers' models only, and not in {engine}: what its requests do with "
                "their KV blocks is on the page Requests.")
        return
    axis = st.sidebar.radio("Over", ["tokens", "time"], key="attention-axis", horizontal=True)
    _fresh(store, chosen, axis)


@st.fragment(run_every=2.0)
def _fresh(store: str, chosen: str | None, axis: str) -> None:
    _draw(store, chosen, axis)


@_common.guarded
def _draw(store: str, chosen: str | None, axis: str) -> None:
    rows = data.attention(store, chosen)
    last = rows[-1][0].record
    kinds = sorted({row.record.layers for row, _ in rows})
    age_s = max(time.time_ns() - last.wall_ns, 0) / data.SECOND_NS
    st.caption(f"Sampled: one of {last.every} decode steps, in bursts of three; last {units.seconds(age_s)} ago. The "
               f"cache that was sampled last: {units.plain(last.model)}, {units.plain(last.cache)}, session "
               f"{units.plain(last.session[:40]) or '-'}, turn {last.turn}.")
    for kind in kinds:
        of_kind = [row for row in rows if row[0].record.layers == kind]
        if len(kinds) > 1:
            st.subheader(f"{units.plain(kind.capitalize())} layers")
        _kind(charts.attention_frame(data.thinned(of_kind)), of_kind[-1], axis, kind)
    st.caption(RULE)


def _kind(table: Any, last: tuple[Stored[AttentionSecond], int | None], axis: str, kind: str) -> None:
    now, held = last[0].record, last[1]
    local = now.local_sum / now.queries if now.queries else None
    chance = now.chance_sum / now.queries if now.queries else None
    strip = [
        ("alive", "Alive (cosine)", units.share(now.alive / now.entries) if now.entries else "absent"),
        ("local", "Mass within 64 tokens", "absent" if local is None else units.share(local)),
        ("chance", "Chance line", "absent" if chance is None else units.share(chance)),
        ("pending", "Blocks pending evict", f"{now.pending:,} of {now.blocks:,}"),
        ("reclaimable", "Reclaimable", units.size(now.reclaimable_bytes)),
        ("held", "Held by the cache", "absent" if held is None else units.size(held)),
    ]
    with st.container(key=f"strip-{kind}"):
        for column, (key, label, text) in zip(st.columns(len(strip)), strip, strict=True):
            with column, st.container(key=f"figure-{kind}-{key}"):
                st.metric(label, text)
    with st.container(key=f"charts-{kind}"):
        _charts(table, axis)


def _charts(table: Any, axis: str) -> None:
    left, right = st.columns(2)
    with left:
        _common.chart(charts.over(table, "Locality: attention mass within 64 tokens (S7)", "share of mass",
                                  ["within 64 tokens", "chance line", "corrected for chance"], axis, share=True),
                      "Locality: nothing but attention sinks is in view yet.")
        _common.chart(charts.over(table, "Life cycle: blocks of 16 tokens, all layers (S4)", "blocks",
                                  ["active", "pending evict"], axis, stacked=True), "Life cycle: no block yet.")
        _common.chart(charts.over(table, "Life cycle: transitions in sampled steps, per second (S4)", "transitions",
                                  ["to pending", "to active"], axis), "Transitions: no block yet.")
    with right:
        _common.chart(charts.over(table, "Alive K/V entries by the cosine rule (S4)", "share of entries",
                                  ["alive (cosine > 0.15)"], axis, share=True), "Alive: no entry in view yet.")
        _common.chart(charts.over_bytes(table, "Reclaimable KV (blocks pending evict) beside what is held",
                                        ["held by the cache", "reclaimable"], axis), "Reclaimable: no block yet.")
