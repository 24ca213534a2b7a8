"""Dense: every token is visible. The baseline, and the limit of every other method for large budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsift.methods.base import Method, Phase
from kvsift.methods.traits import Traits


@dataclass(frozen=True)
class Dense(Method):
    """Every token in every layer; no selection is made."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    traits: ClassVar[Traits] = Traits(selects=False, unbounded=True)
