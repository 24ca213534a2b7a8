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
from typing import Any

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
from kvsift_lab.bench.qk_dump import Dump

IndexPoint = tuple[Case, int, dict[str, Any]]  # to search for k keys; indexes of this case that serve any k, by name


class IndexBench(Bench):
    """Indexes of a recipe on this processor."""

    recipe: IndexRecipe
    kind = "index"

    @classmethod
    def of(cls, recipe: IndexRecipe) -> IndexBench:
        for path in recipe.dumps:
            Dump(Path(path))  # refuses what is not a dump
        return cls(recipe)

    def points(self) -> Iterator[IndexPoint]:
        for layer in self._layers():
            for case in layer.heads() if self.recipe.each_head else [layer]:
                indexes: dict[str, Any] = {}
                for k in self.recipe.ks:
                    yield case, min(k, case.keys.shape[1]), indexes

    def _layers(self) -> Iterator[Case]:
        recipe = self.recipe
        sizes = recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim, recipe.samples, recipe.tokens
        limits = recipe.samples, recipe.tokens, recipe.sinks, recipe.window
        for name in recipe.data:
            if name == DUMPED:
                dumps = [Dump(Path(path)) for path in recipe.dumps]
                yield from (of_dump(dump, layer, *limits) for dump in dumps for layer in dump.layers)
            else:
                yield from (synthetic(name, context, *sizes, recipe.seed) for context in sorted(recipe.contexts))

    def facts(self, point: IndexPoint) -> dict[str, Any]:
        case, k, _ = point
        num_kv_heads, n, head_dim = case.keys.shape
        return {"case": case.name, "keys": n, "k": k, "heads": [len(case.queries), num_kv_heads], "head_dim": head_dim}

    def measure(self, point: IndexPoint) -> dict[str, Any]:
        case, k, indexes = point
        tuning, queries = case.decode_queries(0, 2), case.decode_queries(1, 2)
        tuning_truth, truth = exact(case, tuning, k), exact(case, queries, k)
        rows: list[dict[str, Any]] = []
        searches: dict[str, Callable[[], object]] = {}
        for name in self.recipe.indexes:
            contender = CONTENDERS[name]
            try:
                index = indexes[name] if name in indexes else contender.built(case, k)
            except InputError as error:
                rows.append({"name": name, "reason": str(error)})
                continue
            if not contender.by_k:
                indexes[name] = index
            knob = tune(index, contender, case, tuning, tuning_truth, self.recipe.target)
            rows.append({"name": name, **knob, **searched(index, case, queries, truth, contender)})
            searches[name] = _search(index, case.keys, queries, k)
        rounds = cold_rounds(searches, self.recipe.repeats, self.recipe.cold_bytes).document()
        samples = rounds.pop("samples_s")
        for row in rows:
            row |= {"samples_s": samples[row["name"]]} if row["name"] in samples else {}
        return {"top_mass": float(truth.mass.mean()), "indexes": rows, **rounds}

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point, known={reason for earlier in result["points"][:-1] for reason in reasons(earlier)})

    def closing(self, result: dict[str, Any]) -> str:
        points = result["points"]
        return f"medians\n{medians(points)}" if len(points) > len(self.recipe.ks) else ""


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
