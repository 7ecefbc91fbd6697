"""Chat sessions on the virtual GPU, with and without the breaker: what it keeps and what it costs."""
