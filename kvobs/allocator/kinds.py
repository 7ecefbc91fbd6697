"""What an allocation is for, estimated from the stack that made it.

Frames are asked from the innermost outwards, and the first that a rule of ``_kind_rules`` knows decides: a matmul
inside an attention layer's ``forward`` is an activation although the loop around it is called ``decode_with_kv_cache``,
and the concatenation inside ``cache_utils.update`` is KV although an attention layer called it. Two facts look at
the rest of the stack: what ``forward`` allocates while a backward pass runs is a gradient, unless a checkpoint
recomputes it; and 8,519,680 bytes within a computation are cuBLAS' workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvobs.allocator._kind_rules import BACKWARD, RECOMPUTE, RULES, Rule

KINDS = ("weights", "kv", "activation", "gradient", "optimizer", "workspace", "communication", "unknown")
# 2 x 4,096 KiB + 8 x 16 KiB: the default of CUBLAS_WORKSPACE_CONFIG as at::cuda (CUDABlas workspaces) allocates it,
# for every device before Hopper, where it is a common size of tensors too and is not guessed.
CUBLAS_WORKSPACE = 8_519_680
Frame = tuple[str, int, str]


class Decision(NamedTuple):
    """A kind, the rule that gave it (words), and the frame that decided; none where no rule knew a frame."""

    kind: str
    rule: str
    frame: Frame | None


NO_STACK = Decision("unknown", "no stack was recorded", None)
NO_RULE = Decision("unknown", "no frame is known", None)


class Kinds:
    """Decides stacks, and remembers what it decided about frames: many stacks share them."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], Rule | None] = {}

    def decide(self, frames: Sequence[Frame], size: int = 0) -> Decision:
        """The kind of an allocation of ``size`` bytes (0: any) made by ``frames``, innermost first."""
        if not frames:
            return NO_STACK
        found, rest = NO_RULE, 0
        for index, frame in enumerate(frames):
            rule = self._rule(frame)
            if rule is not None:
                found, rest = Decision(rule.kind, rule.name, frame), index + 1
                break
        if size == CUBLAS_WORKSPACE and found.kind in {"activation", "gradient", "unknown"}:
            return Decision("workspace", "cuBLAS' default workspace, by its size", found.frame)
        if found.kind == "activation":
            for frame in frames[rest:]:
                rule = self._rule(frame)
                if rule is RECOMPUTE:
                    break
                if rule is BACKWARD:
                    return Decision("gradient", f"{BACKWARD.name}, around {found.rule}", frame)
        return found

    def _rule(self, frame: Frame) -> Rule | None:
        key = frame[0], frame[2]
        try:
            return self._rules[key]
        except KeyError:
            file = frame[0].replace("\\", "/")
            found = next((rule for rule in RULES if rule.knows(file, frame[2])), None)
            self._rules[key] = found
            return found


def kind_of(frames: Sequence[Frame], size: int = 0) -> str:
    """The kind alone, one of ``KINDS``. For many stacks, ``Kinds`` is faster."""
    return Kinds().decide(frames, size).kind
