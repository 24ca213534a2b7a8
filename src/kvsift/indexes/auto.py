"""A graph or a scan per KV head, whichever was faster in a trial.

Some queries of the prompt are held out of the graph and rotated to the positions of decode queries. With them the trial
measures the patience that each head needs to find the keys of a scan, and the time of both on this machine. An index
that others share may not depend on the time: there, the keys that both score are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from kvsift.indexes.base import SearchCount, check_search
from kvsift.indexes.flat import FlatIndex
from kvsift.indexes.from_samples import DECODE_POSITIONS, lists_for, rotated, why_no_graph
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import QuerySamples
from kvsift.indexes.trial import IndexedHeads, Trial, chosen, chosen_by_count
from kvsift.types import Rope

LEAST_ROWS = 8192  # a scan of fewer keys is faster than any walk
HELD_OUT = 32  # queries per head that the graph is not built from


class AutoIndex:
    """Consecutive KV heads with an index each.

    Attributes:
        runs: the heads, and the index of each run.
        why: reason of the choice.
        measured: seconds per search of each variant, and per KV head the least sufficient patience, or the largest
            tried, with its recall and keys scanned.
    """

    def __init__(self, runs: list[IndexedHeads], why: str, measured: dict[str, Any], build_seconds: float) -> None:
        self.runs, self.why, self.measured, self.build_seconds = runs, why, measured, build_seconds
        self._count = SearchCount()

    @classmethod
    def build(
        cls, keys: Tensor, samples: QuerySamples | None, *, k: int = 100, first: int = 0, rope: Rope | None = None,
        scale: float | None = None, degree: int = 32, num_samples: int = 8192, window: int = 512,
        per: Literal["kv_head", "query_head"] = "kv_head", target: float = 0.95,
        decode_positions: int | None = DECODE_POSITIONS, timed: bool = True,
    ) -> AutoIndex:  # fmt: skip
        """Time both over ``keys`` and keep the faster.

        Args:
            keys: [num_kv_heads, n, head_dim], of the tokens from position ``first`` on.
            samples: queries of the prompt, if they are known.
            k: keys per search.
            first: position of the first row.
            rope: rotary embedding of the model; without it queries are not rotated.
            scale: scale of the logits; one over the root of head_dim by default.
            degree, num_samples, per, window, decode_positions: options of the graph (``GraphIndex.build``).
            target: share of the k nearest keys, and of the attention among them, that a graph must find.
            timed: False: choose by the number of keys that a graph scores, not by the time.
        """
        started = perf_counter()
        why = why_no_graph(keys, samples)
        if not why and keys.shape[1] < max(LEAST_ROWS, 4 * k):
            why = f"a scan: {keys.shape[1]} tokens are too few for a graph to be faster"
        if why or samples is None:
            return cls([IndexedHeads(0, keys.shape[0], FlatIndex.build(keys))], why, {}, perf_counter() - started)
        held_out, rest = _split(samples)
        queries = rotated(held_out, max(first + keys.shape[1], int(samples.positions[-1]) + 1), rope, decode_positions)
        trial = Trial.of(queries, keys, k, keys.shape[2] ** -0.5 if scale is None else scale)
        graph = GraphIndex.build(
            keys, rest, rope=rope, decode_positions=decode_positions, first_position=first, window=window,
            degree=degree, lists=lists_for(k), num_samples=num_samples, per=per,
        )  # fmt: skip
        choice = (chosen if timed else chosen_by_count)(keys, graph, trial, target)
        return cls(choice.runs, choice.why, choice.measured, perf_counter() - started)

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_search(queries, keys, k)
        self._count.add(0, 0)  # the indexes count keys and bytes
        results = [run.search(queries, keys, k) for run in self.runs]
        if len(results) == 1:
            return results[0]
        return torch.cat([ids for ids, _ in results]), torch.cat([scores for _, scores in results])

    @property
    def walks(self) -> bool:
        """Whether any head has a graph."""
        return any(isinstance(run.index, GraphIndex) for run in self.runs)

    def widen(self, widths: Sequence[float] | None) -> None:
        """Multiply the width of the graph searches, one factor per KV head; scans miss nothing."""
        for run in self.runs:
            if isinstance(run.index, GraphIndex):
                run.index.widen(None if widths is None else widths[run.start : run.stop])

    def extend(self, keys: Tensor) -> None:
        for run in self.runs:
            run.index.extend(keys[run.start : run.stop])

    def crop(self, length: int) -> None:
        for run in self.runs:
            run.index.crop(length)

    def fork(self) -> AutoIndex:
        return AutoIndex([run.fork() for run in self.runs], self.why, self.measured, self.build_seconds)

    @property
    def bytes_read(self) -> int:
        return sum(run.index.bytes_read for run in self.runs)

    def statistics(self) -> dict[str, Any]:
        """As of every index, and "heads", the kind of each KV head, "why" and "measured"."""
        served = [(run.index.statistics(), run.stop - run.start) for run in self.runs]
        num_heads = sum(count for _, count in served)
        return {
            "kind": "auto",
            "heads": [index["kind"] for index, count in served for _ in range(count)],
            "rows": served[0][0]["rows"],
            "bytes": sum(index["bytes"] for index, _ in served),
            "build_seconds": self.build_seconds,
            "searches": self._count.searches,
            "scanned": sum(index["scanned"] * count for index, count in served) / num_heads,
            "why": self.why,
            "measured": self.measured,
            **{
                knob: [value for index, count in served for value in index.get(knob, [None] * count)]
                for knob in ("beam", "patience")
            },
        }


def _split(samples: QuerySamples) -> tuple[QuerySamples, QuerySamples]:
    """Split off the queries of the trial, evenly spread, from the others."""
    count = len(samples.positions)
    held_out = torch.zeros(count, dtype=torch.bool)
    held_out[torch.linspace(0, count - 1, min(HELD_OUT, count // 4)).long()] = True
    trial, rest = (QuerySamples(samples.queries[:, part], samples.positions[part]) for part in (held_out, ~held_out))
    return trial, rest
