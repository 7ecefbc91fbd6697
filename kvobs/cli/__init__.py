"""The command line: one module per command."""

from kvobs.cli._app import main

__all__ = ["main"]
