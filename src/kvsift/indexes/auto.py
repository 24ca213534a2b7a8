"""A graph or a scan, per KV head, whichever was faster when both were tried.

Some of the prompt's queries are kept out of the graph and turned to where decoding will ask. They say how patient a
search of each head must be to find what a scan finds, and what either costs here, on this machine, with these threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from kvsift.indexes.base import SearchCount, check_search
from kvsift.indexes.flat import FlatIndex
from kvsift.indexes.from_samples import DECODE_POSITIONS, lists_for, turned, why_no_graph
from kvsift.indexes.graph import GraphIndex
from kvsift.indexes.samples import QuerySamples
from kvsift.indexes.trial import Run, Trial, chosen
from kvsift.types import Rope

LEAST_ROWS = 8192  # a scan of so few keys is over before a walk has found its way
HELD_OUT = 32  # queries per head that the graph does not see


class AutoIndex:
    """Runs of KV heads with an index each.

    Attributes:
        why: how they were chosen.
        measured: seconds per search of what was tried, and of each KV head the least patience that was good enough,
            or the most that was tried, with its recall and keys scanned.
    """

    def __init__(self, runs: list[Run], why: str, measured: dict[str, Any], build_seconds: float) -> None:
        self.runs, self.why, self.measured, self.build_seconds = runs, why, measured, build_seconds
        self._count = SearchCount()

    @classmethod
    def build(
        cls, keys: Tensor, samples: QuerySamples | None, *, k: int = 100, first: int = 0, rope: Rope | None = None,
        scale: float | None = None, degree: int = 32, num_samples: int = 8192, window: int = 512,
        per: Literal["kv_head", "query_head"] = "kv_head", target: float = 0.95,
    ) -> AutoIndex:  # fmt: skip
        """Try both over ``keys`` and keep the faster.

        Args:
            keys: [num_kv_heads, n, head_dim], of the tokens from position ``first`` on.
            samples: queries of the prompt, if they are known.
            k: keys that will be asked for.
            first: position of the first row.
            rope: how the model turns queries; without it they are taken as they stood.
            scale: of the logits; one over the root of head_dim by default.
            degree, num_samples, per, window: of the graph (``GraphIndex.build``).
            target: share of the k nearest keys, and of the attention among them, that a graph must find.
        """
        started = perf_counter()
        why = why_no_graph(keys, samples)
        if not why and keys.shape[1] < max(LEAST_ROWS, 4 * k):
            why = f"a scan: {keys.shape[1]} tokens are too few for a graph to be faster"
        if why or samples is None:
            return cls([Run(0, keys.shape[0], FlatIndex.build(keys))], why, {}, perf_counter() - started)
        held, rest = _split(samples)
        asked = turned(held, max(first + keys.shape[1], int(samples.positions[-1]) + 1), rope)
        trial = Trial.of(asked, keys, k, keys.shape[2] ** -0.5 if scale is None else scale)
        graph = GraphIndex.build(
            keys, rest, rope=rope, decode_positions=DECODE_POSITIONS, first_position=first, window=window,
            degree=degree, lists=lists_for(k), num_samples=num_samples, per=per,
        )  # fmt: skip
        choice = chosen(keys, graph, trial, target)
        return cls(choice.runs, choice.why, choice.measured, perf_counter() - started)

    def search(self, queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        check_search(queries, keys, k)
        self._count.add(0, 0)  # of its parts, each counts its own
        found = [run.search(queries, keys, k) for run in self.runs]
        if len(found) == 1:
            return found[0]
        return torch.cat([ids for ids, _ in found]), torch.cat([scores for _, scores in found])

    @property
    def walks(self) -> bool:
        """Whether any head has a graph."""
        return any(isinstance(run.index, GraphIndex) for run in self.runs)

    def widen(self, widths: Sequence[float] | None) -> None:
        """Graphs search so many times as wide as was chosen, one number per KV head; scans miss nothing."""
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
        """Besides what every index says: "heads", what serves each KV head, "why" and "measured"."""
        each = [(run.index.statistics(), run.stop - run.start) for run in self.runs]
        num_heads = sum(count for _, count in each)
        return {
            "kind": "auto",
            "heads": [of["kind"] for of, count in each for _ in range(count)],
            "rows": each[0][0]["rows"],
            "bytes": sum(of["bytes"] for of, _ in each),
            "build_seconds": self.build_seconds,
            "searches": self._count.searches,
            "scanned": sum(of["scanned"] * count for of, count in each) / num_heads,
            "why": self.why,
            "measured": self.measured,
            **{
                knob: [value for of, count in each for value in of.get(knob, [None] * count)]
                for knob in ("beam", "patience")
            },
        }


def _split(samples: QuerySamples) -> tuple[QuerySamples, QuerySamples]:
    """Queries to try with, evenly spread, and the others."""
    count = len(samples.positions)
    held = torch.zeros(count, dtype=torch.bool)
    held[torch.linspace(0, count - 1, min(HELD_OUT, count // 4)).long()] = True
    aside, rest = (QuerySamples(samples.queries[:, of], samples.positions[of]) for of in (held, ~held))
    return aside, rest
