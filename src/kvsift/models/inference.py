"""How passes run, whatever the calling thread has turned on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def inference() -> Iterator[None]:
    """Inference mode without ``torch.autocast`` and default devices, which are properties of threads: a thread computes
    for others, too."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))  # where tensors are that name no device
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
