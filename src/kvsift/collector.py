"""Imports and captures without collections of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Let no garbage be collected. CUDA graphs among it cannot be destroyed while another is captured."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause collections while torch and transformers are imported: they make a million objects, none of them garbage,
    and searching them again and again takes a sixth of the time."""
    with collector_off():
        try:
            yield
        finally:
            if gc.get_freeze_count() == 0:  # else unfreezing would undo what the user froze
                gc.freeze()
                gc.unfreeze()  # what was imported is of the oldest generation now, without a search
