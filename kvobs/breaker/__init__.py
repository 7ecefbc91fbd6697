"""The breaker: conditions on signals, a staged and reversible machine, policies, and what runs it in a process."""

from kvobs.breaker._board import BoardReader, BoardWriter, board_directory
from kvobs.breaker._breaker import Breaker
from kvobs.breaker._commands import Command, send, take
from kvobs.breaker._conditions import All, AnyOf, Condition, Latch, Leaf, Reading, Signals
from kvobs.breaker._gate import Decision, Gate, wanted
from kvobs.breaker._limits import UNLIMITED, ByPriority, Limits, SessionPolicy, by_priority
from kvobs.breaker._machine import begin, begin_probe, end_probe, override, reset, step
from kvobs.breaker._policy import PRESETS, PolicyError, load_policy, parse_policy
from kvobs.breaker._protection import Protection
from kvobs.breaker._signals import SIGNALS, Signal
from kvobs.breaker._states import LEVELS, Level, LevelState, Phase, Policy, Probe, State, Transition
from kvobs.breaker._traces import DECISION

__all__ = [
    "DECISION",
    "LEVELS",
    "PRESETS",
    "SIGNALS",
    "UNLIMITED",
    "All",
    "AnyOf",
    "BoardReader",
    "BoardWriter",
    "Breaker",
    "ByPriority",
    "Command",
    "Condition",
    "Decision",
    "Gate",
    "Latch",
    "Leaf",
    "Level",
    "LevelState",
    "Limits",
    "Phase",
    "Policy",
    "PolicyError",
    "Probe",
    "Protection",
    "Reading",
    "SessionPolicy",
    "Signal",
    "Signals",
    "State",
    "Transition",
    "begin",
    "begin_probe",
    "board_directory",
    "by_priority",
    "end_probe",
    "load_policy",
    "override",
    "parse_policy",
    "reset",
    "send",
    "step",
    "take",
    "wanted",
]
