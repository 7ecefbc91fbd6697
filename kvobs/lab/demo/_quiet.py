"""The libraries below show progress bars of their own; the demo has its own."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from unittest import mock

from transformers.utils import logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside the block."""
    tqdm = importlib.import_module("tqdm.auto").tqdm
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The reader of GGUF files does not ask that switch.
        with mock.patch.object(tqdm, "__init__", functools.partialmethod(tqdm.__init__, disable=True)):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
