"""Kubernetes events for ``kvobs k8s-events``: facts from the store, merged as kubectl shows them, and the API."""

from kvobs.cli.k8s._api import connect
from kvobs.cli.k8s._facts import ALERT, Fact, Watch
from kvobs.cli.k8s._recorder import Api, ApiError, Pod, Recorder

__all__ = ["ALERT", "Api", "ApiError", "Fact", "Pod", "Recorder", "Watch", "connect"]
