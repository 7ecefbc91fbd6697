"""What Streamlit runs: navigation over the pages. The store's path is the one argument."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import streamlit as st

# The folder above this one, wherever it was installed; last, so that it hides nothing.
sys.path.append(str(Path(__file__).resolve().parent.parent))

from streamlit_app.views import attention, breaker, explain, live, memory, requests, turns

# Streamlit lets columns shrink until a number reads "14…"; these wrap instead. What is only being drawn again is not
# stale: pages say in words what is.
STYLE = """<style>
[class*="st-key-strip"] [data-testid="stColumn"] { min-width: 10.5rem; }
[class*="st-key-charts"] [data-testid="stColumn"] { min-width: 26rem; }
[data-testid="stSidebarUserContent"] { padding-left: 0.75rem; padding-right: 0.75rem; }
@media (min-width: 900px) { [data-testid="stMainBlockContainer"] { padding-left: 1.25rem; padding-right: 1.25rem; } }
[data-stale="true"] { opacity: 1 !important; }
</style>"""

SIDEBAR = 396  # pixels: a process's role, ranks, model and number are not cut


def main() -> None:
    """Draw the page that the address names."""
    st.set_page_config(page_title="kvobs", layout="wide", initial_sidebar_state=SIDEBAR)
    st.html(STYLE)
    store = sys.argv[1] if len(sys.argv) > 1 else ""
    pages = [(live.render, "Live", "live"), (turns.render, "Turns", "turns"),
             (requests.render, "Requests", "requests"), (memory.render, "Memory map", "memory"),
             (attention.render, "Attention", "attention"), (breaker.render, "Breaker", "breaker"),
             (explain.render, "Explain", "explain")]
    shown = st.navigation([
        st.Page(functools.partial(draw, store), title=title, url_path=address, default=title == "Live")
        for draw, title, address in pages])
    shown.run()


main()
