"""The attention-aware graph: keys that the same queries attend to are neighbours, and a search walks along its edges.

After RetrievalAttention (arXiv 2409.10516), with three changes: sampled prefill queries are rotated to the positions of
decode queries; edges come from counting which keys are found together, not from one star per query; and the query heads
of a KV head share a graph. ``compat="paper"`` builds the graph of the paper.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InvalidTensor
from kvsift.indexes.base import SearchCount, check_keys, check_search
from kvsift.indexes.from_samples import sample_lists
from kvsift.indexes.graph_build import Per, build_graphs, check_form, check_per
from kvsift.indexes.samples import QuerySamples
from kvsift.types import Rope

BEAM = 200  # of a search by default: recall 0.95 of 100 keys on heads with peaked attention at 128K


class GraphIndex:
    """Graphs of one layer of one sequence. They cover the rows they were built from; later rows are scanned exactly.

    Attributes:
        beam: keys that a search follows before it ends, one number per KV head: more finds more and scans more. Below
            the number of keys that a search is for it ends sooner, with the best keys it met. May be set.
        patience: a search ends early after so many followed keys in a row that led to none of the k best; one number
            per KV head, 0 to search to the end of the beam. Hard queries search longer. May be set.
        widths: factors of both, per KV head (``widen``).
        rows: rows of the keys that the graphs cover.
    """

    def __init__(
        self, neighbours: Tensor, entries: Tensor, unseen: list[int], beam: list[int], seconds: dict[str, float]
    ) -> None:  # fmt: skip
        self.neighbours = neighbours  # int32 [num_graphs, built rows, degree], -1 ends a list
        self.entries = entries  # int32 [num_graphs, num_entries], -1 pads at the end
        self.beam = beam
        self.patience = [0] * len(beam)
        self.widths: Sequence[float] = [1.0] * len(beam)
        self.rows = neighbours.shape[1]
        self._unseen = unseen
        self._seconds = seconds
        self.count = SearchCount()

    @classmethod
    def build(
        cls, keys: Tensor, samples: QuerySamples, *, rope: Rope | None = None, decode_positions: int | None = 512,
        first_position: int = 0, window: int = 512, degree: int = 32, lists: int = 200, num_samples: int = 8192,
        per: Per = "kv_head", compat: Literal["paper"] | None = None,
        beam: int | None = None,
    ) -> Self:  # fmt: skip
        """Find the nearest keys of sampled queries (``sample_lists``), and build from them (``from_lists``).

        Each graph is built from ``lists`` keys of ``num_samples`` queries, which its query heads share. ``lists`` is
        twice the k of later searches: the last results are then not at the ends of the lists, which are random.
        """
        start = time.perf_counter()
        check_form(keys)
        check_keys(keys)
        num_query_heads = samples.queries.shape[0]
        num_graphs = num_query_heads if check_per(per) == "query_head" else keys.shape[0]
        per_head = num_samples * num_graphs // max(1, num_query_heads)
        nearest = sample_lists(
            keys, samples, max(1, per_head), lists, rope=rope, decode_positions=decode_positions,
            first_position=first_position, window=window,
        )  # fmt: skip
        knn_seconds = time.perf_counter() - start
        return cls.from_lists(keys, nearest, degree=degree, per=per, compat=compat, beam=beam, knn_seconds=knn_seconds)

    @classmethod
    def from_lists(
        cls, keys: Tensor, lists: Tensor, *, degree: int = 32, per: Per = "kv_head",
        compat: Literal["paper"] | None = None, beam: int | None = None, knn_seconds: float = 0.0,
    ) -> Self:  # fmt: skip
        """Build from the nearest keys of sampled queries.

        Args:
            keys: [num_kv_heads, n, d], CPU, bf16 or float32.
            lists: int32 [num_query_heads, t, k], best first, -1 pads at the end (``knn``).
            degree: neighbours of a key: 4 bytes each, per graph. The paper's build may end with twice as many.
            per: one graph per KV head, or per query head at group_size times the memory.
            compat: ``"paper"``: RoarGraph's construction; slow, for comparison.
            beam: beam of all KV heads.
            knn_seconds: time of the lists, for the statistics.

        Raises:
            InputError: for keys or lists of another form, ids that are not rows of ``keys``, or a degree below 4.
        """
        start = time.perf_counter()
        neighbours, entries, unseen = build_graphs(keys, lists, degree, per, compat)
        seconds = {"knn_seconds": knn_seconds, "build_seconds": time.perf_counter() - start}
        return cls(neighbours, entries, unseen, [BEAM if beam is None else beam] * keys.shape[0], seconds)

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Find keys with large inner products by a walk along the edges.

        Args:
            queries: [num_query_heads, d], of one token.
            keys: [num_kv_heads, n, d], whose first ``rows`` rows are those of the build.
            k: keys per query head.

        Returns:
            ids int64 [num_query_heads, k], best first, -1 at the end; scores float32 [num_query_heads, k], q.k, -inf
            where the id is -1. Equal scores are ordered by id.

        Raises:
            InputError: for shapes or beams that do not fit, k < 1, a query that is not finite, or without the core.
        """
        check_search(queries, keys, k)
        check_form(keys)
        num_kv_heads, n, d = keys.shape
        num_query_heads, num_graphs = queries.shape[0], self.neighbours.shape[0]
        beams = self.widened
        if num_query_heads % num_graphs or len(beams) != num_kv_heads or min(beams) < 1 or n < self.rows:
            raise InvalidTensor(
                f"{num_query_heads} query heads, {num_kv_heads} KV heads, {n} keys, beams {beams}: this index has "
                f"{num_graphs} graphs over {self.rows} rows. Give the heads it was built for, a beam of 1 or more per "
                "KV head, and crop() the index when keys are cut."
            )
        patience = [ceil(steps * width) for steps, width in zip(self.patience, self.widths)]
        floats = queries.to(torch.float32).contiguous()
        ids = torch.empty(num_query_heads, k, dtype=torch.int64)
        scores = torch.empty(num_query_heads, k)
        group_size = num_query_heads // num_kv_heads
        scanned = native.core.graph_search(
            floats.data_ptr(), num_query_heads, keys.data_ptr(), num_kv_heads, keys.stride(0), n, d,
            keys.dtype == torch.bfloat16, self.neighbours.data_ptr(), num_graphs, self.neighbours.shape[1], self.rows,
            self.neighbours.shape[2], self.entries.data_ptr(), self.entries.shape[1],
            [b for b in beams for _ in range(group_size)], [p for p in patience for _ in range(group_size)], k,
            ids.data_ptr(), scores.data_ptr(), native.num_threads(None), native.level(),
        )  # fmt: skip
        self.count.add(sum(scanned) / num_query_heads, sum(scanned) * d * keys.element_size())
        return ids, scores

    def widen(self, widths: Sequence[float] | None) -> None:
        """Multiply ``beam`` and ``patience`` of later searches by one factor per KV head; None restores them."""
        self.widths = [1.0] * len(self.beam) if widths is None else widths

    @property
    def widened(self) -> list[int]:
        """Beams of the next search."""
        return [min(ceil(beam * width), max(beam, self.rows)) for beam, width in zip(self.beam, self.widths)]

    def extend(self, keys: Tensor) -> None:
        """Check new rows, which are scanned."""
        check_keys(keys[:, self.rows :])

    def crop(self, length: int) -> None:
        """Remove the rows from ``length`` on; edges to them are not followed, even if new keys replace them."""
        self.rows = min(self.rows, length)

    def fork(self) -> GraphIndex:
        """Return an index over the same graphs, which are never written to; its counts begin at 0."""
        twin = type(self)(self.neighbours, self.entries, self._unseen, list(self.beam), self._seconds)
        twin.rows, twin.widths, twin.patience = self.rows, self.widths, list(self.patience)
        return twin

    @property
    def bytes_read(self) -> int:
        return self.count.bytes_read

    def statistics(self) -> dict[str, Any]:
        """Return sizes and counts; ``unreachable`` and ``unseen`` count keys per graph.

        Unreachable keys, to which no path leads, are never nearest; unseen keys, in no list, only through neighbouring
        keys.
        """
        core, (num_graphs, _, degree) = native.core, self.neighbours.shape
        unreachable = [
            core.graph_unreachable(near.data_ptr(), self.rows, degree, first.data_ptr(), len(first))
            for near, first in zip(self.neighbours, self.entries)
        ]
        num_bytes = 4 * (self.neighbours.numel() + self.entries.numel())
        return {
            **self.count.statistics("graph", self.rows, num_bytes, **self._seconds),
            "graphs": num_graphs,
            "degree": degree,
            "beam": self.widened,
            "patience": list(self.patience),
            "unseen": list(self._unseen),
            "unreachable": unreachable,
        }
