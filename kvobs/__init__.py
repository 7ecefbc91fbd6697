"""See what happens to the KV cache of a running LLM inference process.

``kvobs run -- python serve.py`` or ``opentelemetry-instrument python serve.py`` need no code;
:func:`instrument` starts from code, :func:`session` names whose turn it is. Importing this package loads
neither torch nor the OpenTelemetry SDK: it is imported in every Python process below ``kvobs run``.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing is not imported at run time for it: that costs more than all of this module
if TYPE_CHECKING:
    from kvobs.autostart import Handle
    from kvobs.sessions import session

__version__ = "0.1.0"
__all__ = ["__version__", "instrument", "session", "uninstrument"]


def instrument(**settings: object) -> Handle:
    """Observe this process from now on; the same settings as ``KVOBS_*``, by their lower-case names.

    Args:
        settings: texts as in the environment, or values (``store=None`` or ``False`` mean off); they win over
            the environment.
    Returns:
        A handle to flush or to end observing; also a context manager.
    Raises:
        kvobs.config.ConfigError: an argument of this call was refused. Nothing else raises: a bad environment
            is logged once and the handle is not ``active``.
    """
    from kvobs import autostart

    return autostart.instrument(settings)


def uninstrument() -> None:
    """Stop observing: everything patched is restored, what was seen is flushed. Safe to call twice."""
    from kvobs import autostart

    autostart.uninstrument()


def __getattr__(name: str) -> object:
    if name == "session":
        from kvobs.sessions import session

        globals()["session"] = session
        return session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
