"""Indexes of the comparison: how each is built for a case, and which knob trades its time for recall."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.indexes.auto import AutoIndex
from kvsift.indexes.base import Index
from kvsift.indexes.faiss_index import load_faiss
from kvsift.indexes.flat import FlatIndex
from kvsift.indexes.from_samples import lists_for
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.hnsw import HNSWIndex
from kvsift.indexes.ivf import IVFIndex
from kvsift_lab.bench.index_cases import Case

PAPER_ROWS = 1 << 15  # keys of a head; above, the paper's build takes too long
STEPS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # beams, in times k


class Contender(NamedTuple):
    """A kind of index.

    Attributes:
        build: over a case, for searches of k keys.
        knob: attribute that trades time for recall; None if there is none, or the index sets it itself.
        turn: sets the knob.
        values: of the knob, ascending, for n keys and k.
        by_k: whether a build serves one k only.
        row_bytes: (head_dim, itemsize) -> bytes read per key scanned; None where it depends on the head.
        shared: whether a key is read once for all query heads of its group.
        most_rows: largest number of keys of a head that it is built for.
    """

    build: Callable[[Case, int], Index]
    knob: str | None = None
    turn: Callable[[Any, int], None] = lambda index, value: None
    values: Callable[[int, int], list[int]] = lambda n, k: []
    by_k: bool = False
    row_bytes: Callable[[int, int], int] | None = lambda head_dim, itemsize: head_dim * itemsize
    shared: bool = False
    most_rows: int | None = None


def beams(n: int, k: int) -> list[int]:
    """Return beam widths: k up to 32 k."""
    return sorted({min(max(round(k * step), 1), max(n, 1)) for step in STEPS})


def probes(n: int, k: int) -> list[int]:
    """Return numbers of clusters to scan, up to all, the square root of n."""
    most = max(int(n**0.5), 1)
    numbers, value = {most}, 1.0
    while value < most:
        numbers.add(round(value))
        value *= 1.25
    return sorted(numbers)


class FaissFlat:
    """faiss's exact search in float32, one index per KV head: the baseline of all others."""

    def __init__(self, keys: Tensor) -> None:
        faiss, started = load_faiss(), perf_counter()
        self._heads = []
        for rows in keys:
            self._heads.append(faiss.IndexFlatIP(keys.shape[2]))
            self._heads[-1].add(rows.float().contiguous().numpy())
        self._rows, self._bytes, self._searches = keys.shape[1], 4 * keys.numel(), 0
        self._build_s = perf_counter() - started

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self._searches += 1
        grouped = queries.float().unflatten(0, (len(self._heads), -1)).numpy()
        results = [head.search(group, k) for head, group in zip(self._heads, grouped, strict=True)]
        scores, ids = (torch.cat([torch.from_numpy(part) for part in parts]) for parts in zip(*results, strict=True))
        return ids, scores.masked_fill(ids < 0, -torch.inf)

    def extend(self, keys: Tensor) -> None:
        """A baseline of a fixed context."""

    def crop(self, length: int) -> None:
        """A baseline of a fixed context."""

    def fork(self) -> FaissFlat:
        return self

    @property
    def bytes_read(self) -> int:
        return self._searches * self._bytes

    def statistics(self) -> dict[str, Any]:
        return {
            "kind": "faiss_flat", "rows": self._rows, "bytes": self._bytes, "build_seconds": self._build_s,
            "searches": self._searches, "scanned": float(self._rows),
        }  # fmt: skip


def _graph(case: Case, k: int, **options: Any) -> Index:
    return GraphIndex.build(case.keys, case.samples, **{**_given(case), "lists": lists_for(k), **options})


def _turn_graph(index: GraphIndex, beam: int) -> None:
    index.beam = [beam] * len(index.beam)


def _turn_hnsw(index: HNSWIndex, beam: int) -> None:
    index.beam = beam


def _turn_ivf(index: IVFIndex, nprobe: int) -> None:
    index.nprobe = nprobe


def _auto(case: Case, k: int) -> Index:
    given = _given(case)
    return AutoIndex.build(case.keys, case.samples, k=k, scale=case.scale, first=given.pop("first_position"), **given)


def _given(case: Case) -> dict[str, Any]:
    """Options of indexes that learn from the samples of a case: use all, however graphs are shared."""
    num_samples = case.samples.queries.shape[0] * len(case.samples.positions)
    return {"rope": case.rope, "first_position": case.first, "window": case.window, "num_samples": num_samples}


def _float32(head_dim: int, itemsize: int) -> int:
    return 4 * head_dim


CONTENDERS: dict[str, Contender] = {
    "flat": Contender(lambda case, k: FlatIndex.build(case.keys), shared=True),
    "flat_int8": Contender(
        lambda case, k: FlatIndex.build(case.keys, codes="int8"), row_bytes=lambda dim, size: dim, shared=True
    ),
    "graph": Contender(_graph, "beam", _turn_graph, beams, by_k=True),
    "graph_causal": Contender(lambda case, k: _graph(case, k, rope=None), "beam", _turn_graph, beams, by_k=True),
    "graph_paper": Contender(
        lambda case, k: _graph(case, k, rope=None, per="query_head", compat="paper"), "beam", _turn_graph, beams,
        by_k=True, most_rows=PAPER_ROWS,
    ),
    "auto": Contender(_auto, by_k=True, row_bytes=None),
    "faiss_flat": Contender(lambda case, k: FaissFlat(case.keys), row_bytes=_float32, shared=True),
    "ivf": Contender(lambda case, k: IVFIndex.build(case.keys), "nprobe", _turn_ivf, probes, row_bytes=_float32),
    "hnsw": Contender(lambda case, k: HNSWIndex.build(case.keys), "beam", _turn_hnsw, beams, row_bytes=_float32),
}  # fmt: skip
