"""What an allocator really did: readers, the twin, verdicts, what-if. Nothing here needs torch or a GPU."""
