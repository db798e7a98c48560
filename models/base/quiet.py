"""Imports large packages: TensorFlow without its first messages, and without garbage collection."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Discards everything written to file descriptor 2, also by native libraries; exceptions pass.

    TensorFlow's libraries print before their log level has an effect.
    """
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switches garbage collection off while large packages are imported: it takes a fifth of the time, and finds nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
