"""Someone who looks over a run's shoulder: told what comes and what was shown, layer by layer; changes nothing."""

from __future__ import annotations

from typing import Protocol

from kvsift.runtime.attend import Segment
from kvsift.types import Chunk, LayerShape, Selection


class Watch(Protocol):
    """Goes into ``RunStats.watch``."""

    def fed(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        """A layer is about to store a chunk, whose last ``decode_tokens`` are generated ones, and to answer it."""

    def answered(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        """A layer has answered queries from all that lies before ``spans[0]`` and from ``spans[1]`` on, and from the
        selection. Segments of a prompt that are answered together are not told."""
