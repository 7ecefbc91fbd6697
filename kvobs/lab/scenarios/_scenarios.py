"""The list of scenarios: a new one is a module here, and a line."""

from __future__ import annotations

from kvobs.lab.scenarios import fragmentation, leak, migration, oom
from kvobs.lab.scenarios._truth import Scenario

SCENARIOS: dict[str, Scenario] = {scenario.truth.scenario: scenario for scenario in (
    Scenario(fragmentation.TRUTH, fragmentation.DEVICES, fragmentation.play),
    Scenario(oom.TRUTH, oom.DEVICES, oom.play),
    Scenario(migration.TRUTH, migration.DEVICES, migration.play),
    Scenario(leak.TRUTH, leak.DEVICES, leak.play),
)}
