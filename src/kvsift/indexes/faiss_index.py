"""Indexes of faiss: one per KV head, and a scan of the later rows.

They are baselines. faiss stores float32 copies of the keys, and builds without queries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from importlib import import_module
from math import ceil, isqrt
from time import perf_counter
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from kvsift.errors import InvalidValue, MissingPackage
from kvsift.indexes.base import SearchCount, best, check_search, merged
from kvsift.indexes.flat import exact_search

BUILD_BEAM = 200
PROBED = 0.3  # share of the clusters by default: queries are distributed unlike keys and need about as many


def load_faiss() -> Any:
    """Import faiss.

    Raises:
        InputError: if it is not installed.
    """
    try:
        return import_module("faiss")
    except ImportError as error:
        raise MissingPackage(
            f"the indexes ivf, hnsw and faiss_flat need faiss, which cannot be imported ({error}). Install it: "
            "pip install faiss-cpu."
        ) from error


class FaissIndex(ABC):
    """One faiss index per KV head, by inner product. Rows added later are scanned exactly.

    Subclasses define the training (``_train``), the width of a search (``_parameters``), and the counter of faiss.
    """

    kind: ClassVar[str]
    counter: ClassVar[str]  # of faiss.cvar

    def __init__(self) -> None:
        self._faiss = load_faiss()
        self._heads: list[Any] = []
        self._rows = self._built = self._bytes = 0  # valid rows; rows in the faiss indexes
        self._build_seconds = 0.0
        self._count = SearchCount()

    @abstractmethod
    def _train(self, rows: Any) -> Any:
        """A faiss index over float32 rows [n, head_dim] of one KV head."""

    @abstractmethod
    def _parameters(self, k: int, selector: Any) -> Any:
        """faiss search parameters."""

    @classmethod
    def build(cls, keys: Tensor, **knobs: int | None) -> Self:
        """Build over keys [num_kv_heads, n, head_dim], with the arguments of the class."""
        started, index = perf_counter(), cls(**knobs)
        index._rows = index._built = keys.shape[1]
        if index._rows:
            # a head per thread, without threads inside faiss, whose order of insertion, and results, would vary
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                index._heads = list(pool.map(index._one_head, keys))
        index._bytes = sum(index._faiss.serialize_index(head).nbytes for head in index._heads)
        index._build_seconds = perf_counter() - started
        return index

    def _one_head(self, rows: Tensor) -> Any:
        self._faiss.omp_set_num_threads(1)  # of this thread
        return self._train(rows.float().contiguous().numpy())

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_search(queries, keys, k)
        rows = min(self._rows, keys.shape[1])
        tail = keys[:, rows:]
        if rows == 0:
            self._count.add(tail.shape[1], tail.numel() * tail.element_size())
            return exact_search(queries, keys, k)
        counted = getattr(self._faiss.cvar, self.counter)
        counted.reset()
        selector = self._faiss.IDSelectorRange(0, rows) if rows < self._built else None  # parameters do not own it
        parameters = self._parameters(k, selector)
        grouped = queries.float().unflatten(0, (keys.shape[0], -1)).numpy()
        results = [head.search(rows, k, params=parameters) for head, rows in zip(self._heads, grouped)]
        scores, ids = (torch.cat([torch.from_numpy(part) for part in parts]) for parts in zip(*results))
        num_bytes = 4 * counted.ndis * queries.shape[1] + tail.numel() * tail.element_size()  # faiss stores float32
        self._count.add(counted.ndis / queries.shape[0] + tail.shape[1], num_bytes)
        nearest = best(ids, scores, k)
        return merged(nearest, exact_search(queries, tail, k), rows, k) if tail.shape[1] else nearest

    def extend(self, keys: Tensor) -> None:  # noqa: B027, a default
        """Leave new rows to be scanned."""

    def crop(self, length: int) -> None:
        self._rows = min(self._rows, length)

    def fork(self) -> Self:
        other = copy(self)  # what is built never changes
        other._count = SearchCount()
        return other

    @property
    def bytes_read(self) -> int:
        return self._count.bytes_read

    def statistics(self) -> dict[str, Any]:
        return self._count.statistics(self.kind, self._rows, self._bytes, build_seconds=self._build_seconds)


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
            raise InvalidValue(f"links={links} must be 2 or more, and beam={beam} 1 or more, or left out.")
        self.links, self.beam = links, beam

    def _train(self, rows: Any) -> Any:
        index = self._faiss.IndexHNSWFlat(rows.shape[1], self.links, self._faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_BEAM
        index.add(rows)
        return index

    def _parameters(self, k: int, selector: Any) -> Any:
        return self._faiss.SearchParametersHNSW(efSearch=max(self.beam or 4 * k, k), sel=selector)


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
            raise InvalidValue(f"nlist={nlist} and nprobe={nprobe} must be 1 or more clusters, or left out.")
        self.nlist, self.nprobe = nlist, nprobe

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
