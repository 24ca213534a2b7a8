"""An observer of a run: called before a chunk is stored and after a segment is attended."""

from __future__ import annotations

from typing import Protocol

from kvsift.stores.base import Segment
from kvsift.types import Chunk, LayerShape, Selection


class Observer(Protocol):
    """The value of ``RunStats.observer``; changes nothing."""

    def before_chunk(self, shape: LayerShape, chunk: Chunk, decode_tokens: int) -> None:
        """Called before a layer stores and attends a chunk, whose last ``decode_tokens`` are generated tokens."""

    def after_segment(
        self, shape: LayerShape, row: int, segment: Segment, spans: tuple[int, int], selection: Selection | None
    ) -> None:
        """Called after a layer attended queries to everything before ``spans[0]`` and from ``spans[1]`` on, and to the
        selection. Not called for segments of a prompt that are attended together."""
