"""Conformance suites for what is written outside kvobs: subclass one, say how yours is made, and let pytest run it."""

from kvobs.testing.actuators import ActuatorContract, Rig

__all__ = ["ActuatorContract", "Rig"]
