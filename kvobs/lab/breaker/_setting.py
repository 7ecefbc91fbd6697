"""What is compared, and on what."""

from __future__ import annotations

from kvobs.lab.breaker._engine import MIB

PROFILE = "L40S"
# The breaker's mode and its policy.
ARMS = {"baseline": ("off", "growing"), "observe": ("observe", "growing"), "act": ("act", "growing"),
        "act, default policy": ("act", "default"), "act, article preset": ("act", "article")}
# One of the 32 layers of a model of 7B parameters (12.6 GiB) on a card of 24 GiB: the same shares, a 32nd of all.
DEVICE_BYTES, WEIGHT_BYTES = 24 * 1024 * MIB // 32, 402 * MIB
