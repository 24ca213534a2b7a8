"""Methods that were defined for chunked prefill: the chunk of their papers is the segment that shares a selection."""

from __future__ import annotations

from dataclasses import dataclass

from kvsift.methods import knobs
from kvsift.methods.base import Method


@dataclass(frozen=True)
class ChunkedMethod(Method):
    """Prefill queries choose together, ``chunk`` of them, however many come in a forward pass.

    Attributes:
        chunk: prefill queries that share a selection. 128 in the papers; larger chunks choose less often.
    """

    chunk: int = 128

    def __post_init__(self) -> None:
        knobs.whole("chunk", self.chunk, 16)

    @property
    def segment_size(self) -> int:  # type: ignore[override]
        return self.chunk


def seen_by_all(start: int, num_queries: int) -> int:
    """How many tokens every query of a segment sees. A query that comes alone sees itself; in a segment, the last token
    must not sway the first."""
    return start + 1 if num_queries == 1 else start
