"""Events over Kubernetes' official client."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from kvobs.cli.k8s._recorder import Api, ApiError, Pod

TIMEOUT_S = 10.0
MISSING = "Kubernetes events need the official client; install with: pip install 'kvobs[k8s]'."


class _Events:
    """``Api`` in one namespace."""

    def __init__(self, core: Any, failure: type[Exception], namespace: str) -> None:
        self._core, self._failure, self._namespace = core, failure, namespace

    def create(self, body: dict[str, Any]) -> None:
        self._call(self._core.create_namespaced_event, self._namespace, body)

    def patch(self, name: str, change: dict[str, Any]) -> None:
        self._call(self._core.patch_namespaced_event, name, self._namespace, change)

    def uid(self, pod: str) -> str:
        return str(self._call(self._core.read_namespaced_pod, pod, self._namespace).metadata.uid or "")

    def _call(self, call: Any, *arguments: object) -> Any:
        try:
            return call(*arguments, _request_timeout=TIMEOUT_S)
        except self._failure as error:
            status = getattr(error, "status", None)
            why = getattr(error, "reason", None) or type(error).__name__
            raise ApiError(f"The Kubernetes API answered {status} ({why})." if status else
                           f"The Kubernetes API cannot be reached ({why}).", status or None) from None
        except Exception as error:  # urllib3's, without a common class with the client's
            raise ApiError(f"The Kubernetes API cannot be reached ({type(error).__name__}).") from None


def connect(namespace: str, name: str, kubeconfig: Path | None, server: str) -> tuple[Api, Pod]:
    """The API, and the pod with its uid: by a kubeconfig, a server's address (a proxy's), or from within the pod.

    Raises:
        ApiError: there is no client or no way to the API, or the pod cannot be read.
    """
    try:
        client, settings = (importlib.import_module(f"kubernetes.{part}") for part in ("client", "config"))
    except ImportError:
        raise ApiError(MISSING) from None
    configuration = client.Configuration()
    configuration.retries = 0  # tried again here, with what came meanwhile
    if server:
        configuration.host = server
    else:
        try:
            if kubeconfig is not None:
                settings.load_kube_config(str(kubeconfig), client_configuration=configuration)
            else:
                settings.load_incluster_config(client_configuration=configuration)
        except settings.ConfigException as error:
            raise ApiError(f"The way to the Kubernetes API is not known: {error}".rstrip(".") + ".") from None
        except Exception as error:  # what YAML, a file or a wrong shape raises has no common class
            raise ApiError(f"The {f'kubeconfig {kubeconfig}' if kubeconfig else 'service account'} cannot be read "
                           f"({type(error).__name__}).") from None
    core = client.CoreV1Api(client.ApiClient(configuration))
    events = _Events(core, client.ApiException, namespace)
    return events, Pod(namespace, name, events.uid(name))
