"""Search of all heads of one layer, index by index, at the same recall.

Every index is built from the same keys and prompt queries. Where a knob trades time for recall, it takes the smallest
value with which half of the decode queries reach the target. Recall, attention mass, scanned keys and times come from
the other half, all indexes in turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.indexes.base import Index
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.host_timing import cold_rounds
from kvsift_lab.bench.index import DUMPED, IndexRecipe, medians, point_text, reasons
from kvsift_lab.bench.index_cases import (
    CONTENDERS,
    Case,
    Contender,
    Truth,
    exact,
    keys_scored,
    mass_of,
    of_dump,
    recall,
    synthetic,
)
from kvsift_lab.bench.machine import host_environment
from kvsift_lab.bench.qk_dump import Dump


class IndexPoint(NamedTuple):
    """A case to search for k keys.

    Attributes:
        indexes: of this case, built for any k, by name.
    """

    case: Case
    k: int
    indexes: dict[str, Index]


class IndexBench(Bench):
    """Indexes of a recipe on this processor."""

    recipe: IndexRecipe
    kind = "index"

    @classmethod
    def of(cls, recipe: IndexRecipe) -> IndexBench:
        for path in recipe.dumps:
            Dump(Path(path))  # refuses what is not a dump
        return cls(recipe)

    def environment(self) -> dict[str, Any]:
        return host_environment()

    def points(self) -> Iterator[IndexPoint]:
        for case in self._cases():
            indexes: dict[str, Index] = {}
            for k in self.recipe.ks:
                yield IndexPoint(case, min(k, case.keys.shape[1]), indexes)

    def _cases(self) -> Iterator[Case]:
        """Layers, or KV heads of them."""
        for name in self.recipe.data:
            for case in self._dumped() if name == DUMPED else self._synthetic(name):
                yield from case.heads() if self.recipe.each_head else [case]

    def _dumped(self) -> Iterator[Case]:
        recipe = self.recipe
        for dump in map(Dump, map(Path, recipe.dumps)):
            for layer in dump.layers:
                yield of_dump(dump, layer, recipe.samples, recipe.tokens, recipe.sinks, recipe.window)

    def _synthetic(self, name: str) -> Iterator[Case]:
        recipe = self.recipe
        sizes = recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim, recipe.samples, recipe.tokens
        for context in sorted(recipe.contexts):
            yield synthetic(name, context, *sizes, recipe.seed)

    def facts(self, point: IndexPoint) -> dict[str, Any]:
        case, (num_kv_heads, n, head_dim) = point.case, point.case.keys.shape
        heads = [len(case.queries), num_kv_heads]
        return {"case": case.name, "keys": n, "k": point.k, "heads": heads, "head_dim": head_dim}

    def measure(self, point: IndexPoint) -> dict[str, Any]:
        case, k, indexes = point
        tuning, queries = case.decode_queries(0, 2), case.decode_queries(1, 2)
        tuning_truth, truth = exact(case, tuning, k), exact(case, queries, k)
        rows: list[dict[str, Any]] = []
        searches: dict[str, Callable[[], object]] = {}
        for name in self.recipe.indexes:
            contender = CONTENDERS[name]
            try:
                index = _built(name, contender, case, k, indexes)
            except InputError as error:
                rows.append({"name": name, "reason": str(error)})
                continue
            knob = tune(index, contender, case, tuning, tuning_truth, self.recipe.target)
            rows.append({"name": name, **knob, **searched(index, case, queries, truth, contender)})
            searches[name] = _search(index, case.keys, queries, k)
        rounds = cold_rounds(searches, self.recipe.repeats, self.recipe.cold_bytes).document()
        samples = rounds.pop("samples_s")
        rows = [row | ({"samples_s": samples[row["name"]]} if row["name"] in samples else {}) for row in rows]
        return {"top_mass": float(truth.mass.mean()), "indexes": rows, **rounds}

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point, known={reason for earlier in result["points"][:-1] for reason in reasons(earlier)})

    def closing(self, result: dict[str, Any]) -> str:
        points = result["points"]
        return f"medians\n{medians(points)}" if len(points) > len(self.recipe.ks) else ""


def _built(name: str, contender: Contender, case: Case, k: int, indexes: dict[str, Index]) -> Index:
    """Return an index of the point, or build it; one for any k is added to ``indexes``."""
    if name in indexes:
        return indexes[name]
    n = case.keys.shape[1]
    if contender.most_rows is not None and n > contender.most_rows:
        raise InputError(f"its build takes too long for {n} keys of a head; it is measured up to {contender.most_rows}")
    index = contender.build(case, k)
    if not contender.by_k:
        indexes[name] = index
    return index


def tune(
    index: Index, contender: Contender, case: Case, queries: Tensor, truth: Truth, target: float
) -> dict[str, Any]:
    """Set the smallest value of the knob with which recall reaches the target, or the largest one.

    Returns:
        "knob", "value" and whether the target was "reached"; nothing without a knob.
    """
    if contender.knob is None:
        return {}
    k = truth.ids.shape[2]
    values = contender.values(case.keys.shape[1], k)

    def reaches(value: int) -> bool:
        contender.turn(index, value)
        return recall(_found(index, case, queries, k), truth.ids) >= target

    first = bisect_left(values, True, key=reaches)  # recall grows with the knob
    value = values[min(first, len(values) - 1)]
    contender.turn(index, value)
    return {"knob": contender.knob, "value": value, "reached": first < len(values)}


def searched(index: Index, case: Case, queries: Tensor, truth: Truth, contender: Contender) -> dict[str, Any]:
    """Return recall and attention mass of searches, and the bytes that they read."""
    k, (num_kv_heads, n, head_dim) = truth.ids.shape[2], case.keys.shape
    before = index.statistics()
    ids = _found(index, case, queries, k)
    after = index.statistics()
    scanned = keys_scored(before, after) / (after["searches"] - before["searches"])
    mass = torch.stack([mass_of(case, *token) for token in zip(queries, ids, truth.lse, strict=True)])
    mass_recall = (mass / truth.mass).clamp_max(1)
    heads, num_bytes = num_kv_heads if contender.shared else queries.shape[1], None
    if contender.row_bytes is not None:
        num_bytes = int(heads * scanned * contender.row_bytes(head_dim, case.keys.element_size()))
    return {
        "recall": recall(ids, truth.ids),
        "mass_recall": float(mass_recall.mean()),
        "worst_mass_recall": float(mass_recall.mean(0).min()),  # of a query head
        "scanned": scanned / n,
        "num_bytes": num_bytes,
        "bytes_per_key": after["bytes"] / (num_kv_heads * n),
        "statistics": after,
    }


def _found(index: Index, case: Case, queries: Tensor, k: int) -> Tensor:
    """Ids of one search per token, int64 [tokens, num_query_heads, k]."""
    return torch.stack([index.search(token, case.keys, k)[0] for token in queries])


def _search(index: Index, keys: Tensor, queries: Tensor, k: int) -> Callable[[], object]:
    """Return a search of all heads, of the next token each time."""
    tokens = cycle(queries)
    return lambda: index.search(next(tokens), keys, k)
