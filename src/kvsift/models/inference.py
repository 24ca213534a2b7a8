"""How passes run, whatever the calling thread has turned on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def inference() -> Iterator[None]:
    """Inference mode without ``torch.autocast``, which is a property of threads: a thread computes for others, too."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
