"""What eight users say to vLLM, two lines each, and how small a pool they share.

Measured with vLLM 0.32.0: in either turn two requests are preempted, cached blocks are evicted and allocations fail.
"""

from __future__ import annotations

DIALOGUES = {
    "balcony": ("I want to grow tomatoes on a balcony. Where do I begin?", "How often should I water them?"),
    "lisbon": ("Plan two days in Lisbon for me.", "Where can I eat fish there?"),
    "cache": ("Explain what a cache is in simple words.", "What happens when it is full?"),
    "birthday": ("Write a short birthday wish for my aunt.", "Make it funnier."),
    "bread": ("How do I make bread without an oven?", "How long does it keep?"),
    "books": ("Name three good books about the sea.", "Which one should I read first?"),
    "sky": ("Why is the sky blue?", "Then why is it red in the evening?"),
    "guitar": ("How can I learn to play the guitar?", "Which song is easy to begin with?"),
}
TURNS = 2
NEW_TOKENS = 48  # of each reply, no more and no fewer
BLOCK_TOKENS = 32  # the smallest block of vLLM's CPU back end
POOL_BLOCKS = 20  # one of them is vLLM's own null block
CONTEXT = 384  # tokens of the longest request that vLLM takes; it must fit the pool
PREEMPTIONS = "vllm:num_preemptions_total"  # vLLM's own counter, read after every step
