"""Events folded into points; points read by exporters, store and views."""

from kvobs.metrics._points import Attributes, Exemplar, Histogram, Observation, Value
from kvobs.metrics._slo import Objectives
from kvobs.metrics._state import FOLDERS, Metrics

__all__ = ["FOLDERS", "Attributes", "Exemplar", "Histogram", "Metrics", "Objectives", "Observation", "Value"]
