"""One module per page; each has ``render(store)``. Streamlit lists a folder called ``pages`` by itself: not this."""
