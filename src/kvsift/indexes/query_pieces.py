"""Queries in pieces that are replaced and never written to, so that forks share them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvsift.indexes.samples import QuerySamples

_SMALL = 64  # pieces of fewer tokens are joined with the next one


class QueryPieces:
    """Queries in pieces, ordered by position."""

    def __init__(self, pieces: list[QuerySamples] | None = None) -> None:
        self.pieces = pieces or []

    def append(self, queries: Tensor, positions: Tensor) -> None:
        # a copy, as a view would keep the whole chunk in memory; on the host, where indexes are
        piece = QuerySamples(queries.to("cpu", copy=True), positions)
        if self.pieces and len(self.pieces[-1].positions) < _SMALL:
            piece = _joined([self.pieces.pop(), piece])
        self.pieces.append(piece)

    def thin(self, stride: int) -> None:
        self._filter(lambda positions: positions % stride == 0)

    def crop(self, length: int) -> None:
        self._filter(lambda positions: positions < length)

    def discard(self, before: int) -> None:
        """Discard the pieces whose queries all precede a position."""
        while self.pieces and int(self.pieces[0].positions[-1]) < before:
            self.pieces.pop(0)

    def joined(self) -> QuerySamples | None:
        return _joined(self.pieces) if self.pieces else None

    def fork(self) -> QueryPieces:
        return QueryPieces(list(self.pieces))

    def _filter(self, keeps: Callable[[Tensor], Tensor]) -> None:
        pieces = []
        for piece in self.pieces:
            keep = keeps(piece.positions)
            if bool(keep.all()):
                pieces.append(piece)
            elif bool(keep.any()):
                pieces.append(QuerySamples(piece.queries[:, keep], piece.positions[keep]))
        self.pieces = pieces


def _joined(pieces: list[QuerySamples]) -> QuerySamples:
    queries, positions = zip(*pieces)
    return QuerySamples(torch.cat(queries, 1), torch.cat(positions))
