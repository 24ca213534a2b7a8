"""Rows of small integers that the host knows, on the devices that read them."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row", bound=tuple[int, ...])


class IntegerRows(tuple[Row, ...]):
    """Rows of equal length. A device gets them once, whichever layers of a model read them."""

    def on(self, device: torch.device) -> Tensor:
        """int32 [num_rows, width]; only the stream that is current at the first call may read it."""
        copies: dict[torch.device, Tensor] = vars(self).setdefault("copies", {})
        if device not in copies:
            copies[device] = torch.tensor(self, dtype=torch.int32).to(device, non_blocking=True)
        return copies[device]
