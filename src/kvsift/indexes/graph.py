"""The attention-aware graph: keys that the same queries want are neighbours, and a query walks from key to key.

After RetrievalAttention (arXiv 2409.10516), with three changes: sampled prefill queries are turned to the positions
that decode queries will have; edges come from counting which keys are found together, not from one star per query; and
the query heads of a KV head share a graph. ``compat="paper"`` builds as the paper does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InputError, unknown
from kvsift.indexes.base import SearchCount, check_keys, check_search
from kvsift.indexes.sample_lists import sample_lists
from kvsift.indexes.samples import QuerySamples
from kvsift.types import Rope

BEAM = 200  # of a search, unless told: recall 0.95 of 100 keys on peaky heads at 128K
LISTS_PER_KEY = 128  # of the lists that contain a key, so many are counted at most; 1024 build no better graph
NUM_ENTRIES = 16
PAPER_BEAM = 500  # of the searches that link keys in the paper's build


class GraphIndex:
    """Graphs of one layer of one sequence. They cover the rows they were built from; later rows are scanned exactly.

    Attributes:
        beam: keys that a search follows before it ends, one number per KV head: more finds more and scans more. Set
            it at will.
        patience: a search ends sooner when so many keys that it followed, one after the other, brought it none of the k
            best; one number per KV head, 0 to go on to the end of the beam. Queries that are harder than others
            search longer. Set it at will.
        widths: how many times that either is, per KV head (``widen``).
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
        cls, keys: Tensor, samples: QuerySamples, *, rope: Rope | None = None, decode_positions: int = 512,
        first_position: int = 0, window: int = 512, degree: int = 32, lists: int = 200, num_samples: int = 8192,
        per: Literal["kv_head", "query_head"] = "kv_head", compat: Literal["paper"] | None = None,
        beam: int | None = None,
    ) -> Self:  # fmt: skip
        """Find what sampled queries want (``sample_lists``), and build from it (``from_lists``).

        ``lists`` keys of ``num_samples`` queries go into each graph; the query heads of a graph share its samples.
        Twice as many keys as a search will ask for: the last of those that it seeks are then not at the lists' ends,
        where chance decides.
        """
        start = time.perf_counter()
        _check_form(keys)
        check_keys(keys)
        num_query_heads = samples.queries.shape[0]
        per_head = num_samples if _per(per) == "query_head" else num_samples * keys.shape[0] // max(1, num_query_heads)
        found = sample_lists(
            keys, samples, max(1, per_head), lists, rope=rope, decode_positions=decode_positions,
            first_position=first_position, window=window,
        )  # fmt: skip
        knn_seconds = time.perf_counter() - start
        return cls.from_lists(keys, found, degree=degree, per=per, compat=compat, beam=beam, knn_seconds=knn_seconds)

    @classmethod
    def from_lists(
        cls, keys: Tensor, lists: Tensor, *, degree: int = 32, per: Literal["kv_head", "query_head"] = "kv_head",
        compat: Literal["paper"] | None = None, beam: int | None = None, knn_seconds: float = 0.0,
    ) -> Self:  # fmt: skip
        """Build from the ids that sampled queries want.

        Args:
            keys: [num_kv_heads, n, d], CPU, bf16 or float32.
            lists: int32 [num_query_heads, t, k], best first, -1 pads at the end (``knn``).
            degree: neighbours of a key: 4 bytes each, per graph. The paper's build may end with twice as many.
            per: one graph per KV head, or per query head at group_size times the memory.
            compat: ``"paper"``: RoarGraph's construction; slow, for comparison.
            beam: of all KV heads.
            knn_seconds: what the lists cost, for the statistics.

        Raises:
            InputError: for keys or lists of another form, ids that are not rows of ``keys``, or a degree below 4.
        """
        start = time.perf_counter()
        _check_form(keys)
        num_kv_heads, n, _ = keys.shape
        if lists.ndim != 3 or lists.shape[0] == 0 or lists.shape[0] % num_kv_heads:
            raise InputError(f"lists {tuple(lists.shape)}: give [num_query_heads, t, k] for {num_kv_heads} KV heads.")
        if lists.numel() and (int(lists.max()) >= n or int(lists.min()) < -1):
            raise InputError(
                f"lists hold ids from {int(lists.min())} to {int(lists.max())}; keys have rows 0 to {n - 1}."
            )
        if degree < 4 or compat not in (None, "paper"):
            raise InputError(f"degree={degree}, compat={compat!r}: degree must be at least 4, compat None or 'paper'.")
        num_graphs = num_kv_heads if _per(per) == "kv_head" else lists.shape[0]
        grouped = lists.to("cpu", torch.int32).reshape(num_graphs, -1, lists.shape[2]).contiguous()
        num_entries = 1 if compat else NUM_ENTRIES
        neighbours = torch.empty(num_graphs, n, degree * (2 if compat else 1), dtype=torch.int32)
        native.advise_huge(neighbours)  # a walk reads here and there: with small pages it waits for addresses, too
        entries = torch.full((num_graphs, num_entries), -1, dtype=torch.int32)
        unseen = []
        for graph in range(num_graphs):
            given = (grouped[graph].data_ptr(), grouped.shape[1], grouped.shape[2])
            made = neighbours[graph].data_ptr(), entries[graph].data_ptr()
            if compat:
                head = keys[graph * num_kv_heads // num_graphs]
                unseen.append(native.core().graph_build_paper(
                    head.data_ptr(), *head.shape, head.dtype == torch.bfloat16, *given, degree, PAPER_BEAM, *made,
                    native.num_threads(None), native.level(),
                ))  # fmt: skip
            else:
                unseen.append(native.core().graph_build(
                    *given, n, degree, LISTS_PER_KEY, *made, num_entries, native.num_threads(None)
                ))  # fmt: skip
        seconds = {"knn_seconds": knn_seconds, "build_seconds": time.perf_counter() - start}
        return cls(neighbours, entries, unseen, [BEAM if beam is None else beam] * num_kv_heads, seconds)

    @classmethod
    def random(cls, keys: Tensor, *, degree: int, beam: int, seed: int = 0) -> GraphIndex:
        """Links drawn at random, to time a walk: it finds little."""
        generator, n = torch.Generator().manual_seed(seed), keys.shape[1]
        neighbours = torch.randint(0, n, (len(keys), n, degree), generator=generator, dtype=torch.int32)
        entries = torch.randint(0, n, (len(keys), NUM_ENTRIES), generator=generator, dtype=torch.int32)
        return cls(neighbours, entries, [0] * len(keys), [beam] * len(keys), {"knn_seconds": 0.0, "build_seconds": 0.0})

    def search(self, queries: Tensor, keys: Tensor, k: int, *, beam: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """The keys with the largest inner products, as far as the walk finds them.

        Args:
            queries: [num_query_heads, d], of one token.
            keys: [num_kv_heads, n, d], whose first ``rows`` rows are those of the build.
            k: keys per query head.
            beam: instead of the attribute. It may be below k: the walk then ends sooner, and keeps the k best it met.

        Returns:
            ids int64 [num_query_heads, k], best first, -1 at the end; scores float32 [num_query_heads, k], q.k, -inf
            where the id is -1. Equal scores are ordered by id.

        Raises:
            InputError: for shapes or beams that do not fit, k < 1, a query that is not finite, or without the core.
        """
        check_search(queries, keys, k)
        _check_form(keys)
        num_kv_heads, n, d = keys.shape
        num_query_heads, num_graphs = queries.shape[0], self.neighbours.shape[0]
        beams = self.widened if beam is None else beam
        if num_query_heads % num_graphs or len(beams) != num_kv_heads or min(beams) < 1 or n < self.rows:
            raise InputError(
                f"{num_query_heads} query heads, {num_kv_heads} KV heads, {n} keys, beams {beams}: this index has "
                f"{num_graphs} graphs over {self.rows} rows. Give the heads it was built for, a beam of 1 or more per "
                "KV head, and crop() the index when keys are cut."
            )
        patience = [ceil(each * width) for each, width in zip(self.patience, self.widths)]
        asked = queries.to(torch.float32).contiguous()
        ids = torch.empty(num_query_heads, k, dtype=torch.int64)
        scores = torch.empty(num_query_heads, k)
        group_size = num_query_heads // num_kv_heads
        scanned = native.core().graph_search(
            asked.data_ptr(), num_query_heads, keys.data_ptr(), num_kv_heads, keys.stride(0), n, d,
            keys.dtype == torch.bfloat16, self.neighbours.data_ptr(), num_graphs, self.neighbours.shape[1], self.rows,
            self.neighbours.shape[2], self.entries.data_ptr(), self.entries.shape[1],
            [b for b in beams for _ in range(group_size)], [p for p in patience for _ in range(group_size)], k,
            ids.data_ptr(), scores.data_ptr(), native.num_threads(None), native.level(),
        )  # fmt: skip
        self.count.add(sum(scanned) / num_query_heads, sum(scanned) * d * keys.element_size())
        return ids, scores

    def widen(self, widths: Sequence[float] | None) -> None:
        """Search so many times as wide as ``beam`` says, and as long as ``patience`` does, one number per KV head; None
        is once."""
        self.widths = [1.0] * len(self.beam) if widths is None else widths

    @property
    def widened(self) -> list[int]:
        """The beams that a search takes now."""
        return [min(ceil(beam * width), max(beam, self.rows)) for beam, width in zip(self.beam, self.widths)]

    def extend(self, keys: Tensor) -> None:
        """Rows after those of the build are scanned: there is nothing to do but to look at them."""
        check_keys(keys[:, self.rows :])

    def crop(self, length: int) -> None:
        """Rows from ``length`` on are gone; edges to them are not followed, even if new keys take their place."""
        self.rows = min(self.rows, length)

    def fork(self) -> GraphIndex:
        """An index of its own over the same graphs, which nobody writes to; its counts begin anew."""
        twin = type(self)(self.neighbours, self.entries, self._unseen, list(self.beam), self._seconds)
        twin.rows, twin.widths, twin.patience = self.rows, self.widths, list(self.patience)
        return twin

    @property
    def bytes_read(self) -> int:
        return self.count.bytes_read

    def statistics(self) -> dict[str, Any]:
        """What was built and how it did so far; ``unreachable`` and ``unseen`` count keys per graph.

        Keys that no path leads to are never found; those that no sampled query wanted only over the keys beside them.
        """
        core, (num_graphs, _, degree) = native.core(), self.neighbours.shape
        unreachable = [
            core.graph_unreachable(
                self.neighbours[graph].data_ptr(),
                self.rows,
                degree,
                self.entries[graph].data_ptr(),
                self.entries.shape[1],
            )
            for graph in range(num_graphs)
        ]
        return {
            "kind": "graph",
            "rows": self.rows,
            "bytes": 4 * (self.neighbours.numel() + self.entries.numel()),
            **self._seconds,
            "searches": self.count.searches,
            "scanned": self.count.mean,
            "graphs": num_graphs,
            "degree": degree,
            "beam": self.widened,
            "patience": list(self.patience),
            "unseen": list(self._unseen),
            "unreachable": unreachable,
        }


def _per(per: str) -> str:
    if per not in ("kv_head", "query_head"):
        raise unknown("kind of graph", per, ("kv_head", "query_head"))
    return per


def _check_form(keys: Tensor) -> None:
    if keys.ndim != 3 or keys.device.type != "cpu" or keys.dtype not in (torch.bfloat16, torch.float32):
        raise InputError(
            f"keys {tuple(keys.shape)}, {keys.dtype} on {keys.device}: an index needs [num_kv_heads, n, d] on the CPU, "
            "bf16 or float32."
        )
    if keys.numel() and (keys.stride(2) != 1 or (keys.shape[1] > 1 and keys.stride(1) != keys.shape[2])):
        raise InputError(f"keys with strides {keys.stride()}: rows of a head must lie next to each other in memory.")
