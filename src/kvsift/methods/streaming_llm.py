"""StreamingLLM: sinks and the most recent tokens, nothing between (https://arxiv.org/abs/2309.17453).

Deviation from the paper: keys keep their absolute positions, as in most re-implementations; the paper's caches
positions 0.. inside the window. Nothing is dropped from the store; it is only not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvsift.methods.base import Method, Phase


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Sinks and window alone: the whole budget that sinks leave is the window."""

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    selects: ClassVar[bool] = False
    slides: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv 2309.17453"
