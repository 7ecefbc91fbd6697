"""Sessions: who is talking, how important they are, and (later) what a conversation can give up."""

from kvobs.sessions._scope import PRIORITIES, Names, Priority, Scope, TurnNumbers, current, session

__all__ = ["PRIORITIES", "Names", "Priority", "Scope", "TurnNumbers", "current", "session"]
