"""A policy's file, which may change while its breaker runs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvobs.breaker._policy import PolicyError, parse_policy
from kvobs.breaker._states import Policy

MOST_BYTES = 262_144


class PolicyFile:
    """Looked at about once a second. The file is read each time: one that was written twice within a tick of the file
    system's clock has the same time, size and number, and another text.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # the process may go elsewhere
        self._before: bytes | str | None = None
        self._judged: bytes | str | None = None

    def look(self) -> Policy | None:
        """The policy, once for each text that the file has had for two looks: an editor may not be done writing.

        Raises:
            PolicyError: the text is no policy, or cannot be read; one sentence, once for each.
        """
        found = self._read()
        settled, self._before = found == self._before, found
        if not settled or found == self._judged:
            return None
        self._judged = found
        if isinstance(found, str):
            raise PolicyError(found)
        try:
            text = found.decode()
        except UnicodeDecodeError as error:
            raise PolicyError(f"The policy {self.path} cannot be read: {error}.") from None
        return parse_policy(text, str(self.path))

    def _read(self) -> bytes | str:
        """What is in the file, or why that cannot be told. A pipe is not waited for."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            return f"The policy {self.path} cannot be read: {error.strerror or error}."
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return f"The policy {self.path} is not a file."
            data = os.read(descriptor, MOST_BYTES + 1)
        except OSError as error:
            return f"The policy {self.path} cannot be read: {error.strerror or error}."
        finally:
            os.close(descriptor)
        return data if len(data) <= MOST_BYTES else f"The policy {self.path} has more than {MOST_BYTES} bytes."
