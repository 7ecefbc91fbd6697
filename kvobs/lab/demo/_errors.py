"""How the demo ends early."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; ``str()`` is one whole sentence. ``exit_code`` is 2 where the user can mend it."""

    def __init__(self, sentence: str, exit_code: int = 2) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
