"""IVF: k-means clusters of the keys; a search scans the nearest ones. A baseline, through faiss."""

from __future__ import annotations

from math import ceil, isqrt
from typing import Any, ClassVar

from torch import Tensor

from kvsift.errors import InputError
from kvsift.indexes.faiss_index import FaissIndex

PROBED = 0.3  # share of the clusters by default: queries are distributed unlike keys and need about as many


class IVFIndex(FaissIndex):
    """Clusters of keys, per KV head.

    Args:
        nlist: clusters; the square root of the number of rows by default.
        nprobe: clusters scanned per query; three in ten by default.
    """

    kind: ClassVar[str] = "ivf"
    counter: ClassVar[str] = "indexIVF_stats"

    def __init__(self, nlist: int | None = None, nprobe: int | None = None) -> None:
        super().__init__()
        if (nlist is not None and nlist < 1) or (nprobe is not None and nprobe < 1):
            raise InputError(f"nlist={nlist} and nprobe={nprobe} must be 1 or more clusters, or left out.")
        self.nlist, self.nprobe = nlist, nprobe

    @classmethod
    def build(cls, keys: Tensor, *, nlist: int | None = None, nprobe: int | None = None) -> IVFIndex:
        """Build over keys [num_kv_heads, n, head_dim]."""
        index = cls(nlist, nprobe)
        index._build(keys)
        return index

    def fork(self) -> IVFIndex:
        copy = IVFIndex(self.nlist, self.nprobe)
        self._copy_to(copy)
        return copy

    @property
    def num_lists(self) -> int:
        """Clusters in use."""
        return min(self.nlist or isqrt(self._built), self._built)

    def _train(self, rows: Any) -> Any:
        faiss, width = self._faiss, rows.shape[1]
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(width), width, self.num_lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1  # silences a warning of faiss
        index.train(rows)
        index.add(rows)
        return index

    def _parameters(self, k: int, selector: Any) -> Any:
        probed = min(self.nprobe or ceil(PROBED * self.num_lists), self.num_lists)
        return self._faiss.SearchParametersIVF(nprobe=probed, sel=selector)
