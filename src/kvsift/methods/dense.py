"""Dense: every token is visible. The baseline, and what every other method becomes when its budget is large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsift.methods.base import Method, Phase


@dataclass(frozen=True)
class Dense(Method):
    """Everything, always: the runtime attends densely and asks nothing."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    selects: ClassVar[bool] = False
    unbounded: ClassVar[bool] = True
