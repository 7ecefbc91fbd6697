"""Units of the catalog (UCUM) as Grafana names them."""

from __future__ import annotations

_UNITS = {"By": "bytes", "By/s": "binBps", "s": "s", "s/s": "percentunit", "1": "percentunit", "W": "watt",
          "J/s": "watt", "Cel": "celsius", "factor": "none", "{operation}/s": "ops", "{request}/s": "reqps"}


def grafana_unit(ucum: str) -> str:
    """Grafana's unit of a UCUM unit; seconds per second are a share.

    Raises:
        ValueError: Grafana has no such unit.
    """
    if ucum in _UNITS:
        return _UNITS[ucum]
    if ucum.startswith("{"):
        return "cps" if ucum.endswith("/s") else "short"
    raise ValueError(f"No unit of Grafana is known for {ucum!r}.")
