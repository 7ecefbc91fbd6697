"""Scripted incidents with known ground truth, on virtual GPUs that are sized for them, with kvobs looking on.

``SCENARIOS`` is the one list of them, by name. Each plays real requests of a tiny model with random weights, states
beforehand as data what is true (``Truth``), and gives what kvobs said. Devices cannot be changed in a process: each
scenario needs one of its own.
"""

from kvobs.lab.scenarios._run import run
from kvobs.lab.scenarios._scenarios import SCENARIOS
from kvobs.lab.scenarios._truth import Claim, Expected, Played, Scenario, Truth, claims

__all__ = ["SCENARIOS", "Claim", "Expected", "Played", "Scenario", "Truth", "claims", "run"]
