"""``python -m tests.bench``: what kvobs costs, as ratios of one run beside that run's own A/A interval.

Not collected by pytest: a number measured on a shared machine is read, never asserted.
"""

from __future__ import annotations

import os

# Before torch is imported anywhere: one thread, so that the main thread's CPU time is the engine's.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
# What is measured is the default: no setting of the caller's shell reaches it.
for _name in [name for name in os.environ if name.startswith(("KVOBS_", "OTEL_"))
              and not name.startswith(("KVOBS_BENCH_", "KVOBS_TEST_"))]:
    del os.environ[_name]
