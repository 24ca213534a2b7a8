"""HNSW: a hierarchical graph of near keys. A baseline, through faiss."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from kvsift.errors import InputError
from kvsift.indexes.faiss_index import FaissIndex

BUILD_BEAM = 200


class HNSWIndex(FaissIndex):
    """A hierarchical graph of keys, per KV head.

    Args:
        links: neighbours per key, M; twice as many on the lowest level.
        beam: size of the candidate list of a search, ef; 4 k by default.
    """

    kind: ClassVar[str] = "hnsw"
    counter: ClassVar[str] = "hnsw_stats"

    def __init__(self, links: int = 32, beam: int | None = None) -> None:
        super().__init__()
        if links < 2 or (beam is not None and beam < 1):
            raise InputError(f"links={links} must be 2 or more, and beam={beam} 1 or more, or left out.")
        self.links, self.beam = links, beam

    @classmethod
    def build(cls, keys: Tensor, *, links: int = 32, beam: int | None = None) -> HNSWIndex:
        """Build over keys [num_kv_heads, n, head_dim]."""
        index = cls(links, beam)
        index._build(keys)
        return index

    def fork(self) -> HNSWIndex:
        copy = HNSWIndex(self.links, self.beam)
        self._copy_to(copy)
        return copy

    def _train(self, rows: Any) -> Any:
        index = self._faiss.IndexHNSWFlat(rows.shape[1], self.links, self._faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_BEAM
        index.add(rows)
        return index

    def _parameters(self, k: int, selector: Any) -> Any:
        return self._faiss.SearchParametersHNSW(efSearch=max(self.beam or 4 * k, k), sel=selector)
