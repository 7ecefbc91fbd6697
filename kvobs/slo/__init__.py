"""Objectives judged: good and bad events, error budgets, burn rates, and the same as Prometheus rules. Pure."""

from kvobs.slo._burn import ALERTS, Alert, History, budget_left, burn_rate, firing, refusal, refusals, window_text
from kvobs.slo._ledger import Ledger, Standing
from kvobs.slo._rules import alert_expression, alert_rules, burn_expression

__all__ = [
    "ALERTS",
    "Alert",
    "History",
    "Ledger",
    "Standing",
    "alert_expression",
    "alert_rules",
    "budget_left",
    "burn_expression",
    "burn_rate",
    "firing",
    "refusal",
    "refusals",
    "window_text",
]
