"""What only a GPU can show: ``python tests/gpu/record.py --out DIR`` on a machine with one.

The machine needs torch built for CUDA, transformers, what kvobs itself depends on (pyproject.toml), and a C++ compiler
for the second engine; no network. ``--model DIR`` names a checkpoint with a chat template, as ``kvobs demo`` prepares
one below ``~/.cache/kvobs/models`` (270 MB). Without it the model has SmolLM2-135M's shape, random weights and made-up
tokens: the allocator is asked for the same sizes, and the figures say which of the two ran.
"""
