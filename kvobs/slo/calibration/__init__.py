"""Calibration: the largest threshold of a signal that keeps a latency within its SLO, with confidence. Pure."""

from kvobs.slo.calibration._binomial import interval
from kvobs.slo.calibration._calibration import Calibration, Choice, Drift, Question, Resemblance, Tested, calibrate
from kvobs.slo.calibration._csv import Unreadable, latency_unit, read_csv
from kvobs.slo.calibration._page import page
from kvobs.slo.calibration._text import CHOICE_COLUMNS, breaker_name, choice_rows, counted, fragment
from kvobs.slo.calibration._windows import Sample, Windows, in_windows

__all__ = [
    "CHOICE_COLUMNS",
    "Calibration",
    "Choice",
    "Drift",
    "Question",
    "Resemblance",
    "Sample",
    "Tested",
    "Unreadable",
    "Windows",
    "breaker_name",
    "calibrate",
    "choice_rows",
    "counted",
    "fragment",
    "in_windows",
    "interval",
    "latency_unit",
    "page",
    "read_csv",
]
