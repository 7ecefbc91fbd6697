"""How a command refuses."""

from __future__ import annotations


class Refused(Exception):
    """The user asked for something that cannot be done; ``str()`` is one whole sentence."""

    def __init__(self, sentence: str, exit_code: int = 2) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
