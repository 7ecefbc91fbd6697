"""The libraries below show progress bars of their own; the demo has its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

from tqdm.auto import tqdm
from transformers.utils import logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside the block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    # The reader of GGUF files does not ask that switch.
    silent = functools.partialmethod(tqdm.__init__, disable=True)
    try:
        with mock.patch.object(tqdm, "__init__", silent):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
