"""Search of all heads of one layer, index by index: time, recall and what was read, each at the same recall.

Every index is built from the same keys and prompt queries. Where a number trades time for recall, the smallest one is
taken with which some decode queries reach the target; recall, attention mass and scanned keys are then those of
other decode queries, and so are the times, all indexes in turns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvsift import native
from kvsift.benchmarks.host_timing import cold_rounds
from kvsift.benchmarks.index_cases import (
    SINKS,
    SYNTHETIC,
    WINDOW,
    Case,
    Truth,
    exact,
    mass_of,
    of_dump,
    recall,
    synthetic,
)
from kvsift.benchmarks.index_contenders import CONTENDERS, Contender
from kvsift.benchmarks.prefill_layer import COLD_BYTES
from kvsift.benchmarks.qk_dump import Dump
from kvsift.errors import InputError, unknown
from kvsift.indexes.base import Index

DUMPED = "P"
TARGET = 0.95


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        data: sets; R, S and T are synthetic, P is every layer of ``dumps``.
        contexts: keys per KV head of the synthetic sets.
        ks: keys searched for.
        dumps: files of ``kvsift bench dump``.
        indexes: names of ``CONTENDERS``.
        num_query_heads, num_kv_heads, head_dim: of the synthetic sets.
        each_head: measure every KV head with its group alone, and tune for it alone.
        samples: prompt queries per query head to learn from.
        tokens: decode steps asked, the first half to tune, the second to measure.
        target: recall that indexes are tuned for.
        repeats: samples of each time.
        seed: of the synthetic sets.
        sinks, window: tokens at either end of a dump that are in no index.
        cold_bytes: read before every sample.
    """

    data: tuple[str, ...]
    contexts: tuple[int, ...]
    ks: tuple[int, ...] = (100,)
    dumps: tuple[str, ...] = ()
    indexes: tuple[str, ...] = tuple(CONTENDERS)
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    each_head: bool = False
    samples: int = 2048
    tokens: int = 32
    target: float = TARGET
    repeats: int = 20
    seed: int = 0
    sinks: int = SINKS
    window: int = WINDOW
    cold_bytes: int = COLD_BYTES

    def __post_init__(self) -> None:
        for name in self.data:
            if name not in (*SYNTHETIC, DUMPED):
                raise unknown("data set", name, (*SYNTHETIC, DUMPED))
        for name in self.indexes:
            if name not in CONTENDERS:
                raise unknown("index", name, CONTENDERS)
        if not self.data or not self.indexes or not self.ks:
            raise InputError("there is nothing to measure: name at least one data set, index and k.")
        if not self.contexts and set(self.data) & set(SYNTHETIC):
            raise InputError("there is nothing to measure: name at least one context.")
        if (DUMPED in self.data) != bool(self.dumps):
            raise InputError(
                "data set P and a dump belong together: kvsift bench dump --out FILE makes one, and --dump FILE "
                "reads it."
            )
        if self.num_query_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_query_heads} query heads must be a multiple of the KV heads, {self.num_kv_heads}."
            )
        if self.tokens < 2 or self.samples < 1:
            raise InputError("give at least 2 --tokens, to tune and to measure apart, and 1 --samples.")
        if not 0 < self.target <= 1:
            raise InputError(f"a recall of {self.target:g} cannot be aimed at; give more than 0, and 1 at most.")


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    level = native.level() if native.available() else ""
    return {"kind": "index", "recipe": asdict(recipe), "threads": torch.get_num_threads(), "level": level}


def run(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Case by case and k by k, as they are measured; indexes that cannot run with their reason."""
    for case in cases(recipe):
        kept: dict[str, Index] = {}  # built once for every k
        for k in recipe.ks:
            yield measure(case, k, recipe, kept)


def cases(recipe: Recipe) -> Iterator[Case]:
    """Layers, or KV heads of them."""
    for name in recipe.data:
        for case in _dumped(recipe) if name == DUMPED else _synthetic(recipe, name):
            yield from case.heads() if recipe.each_head else [case]


def _dumped(recipe: Recipe) -> Iterator[Case]:
    for path in recipe.dumps:
        dump = Dump(Path(path))
        for layer in dump.layers:
            yield of_dump(dump, layer, recipe.samples, recipe.tokens, recipe.sinks, recipe.window)


def _synthetic(recipe: Recipe, name: str) -> Iterator[Case]:
    sizes = recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim, recipe.samples, recipe.tokens
    for context in sorted(recipe.contexts):
        yield synthetic(name, context, *sizes, recipe.seed)


@torch.inference_mode()
def measure(case: Case, k: int, recipe: Recipe, kept: dict[str, Index]) -> dict[str, Any]:
    """All indexes on one case, for one k. What serves any k is taken from ``kept``, and put there."""
    n = case.keys.shape[1]
    k = min(k, n)
    tuning, asked = case.asked(0, 2), case.asked(1, 2)
    tuning_truth, truth = exact(case, tuning, k), exact(case, asked, k)
    rows: list[dict[str, Any]] = []
    searches: dict[str, Callable[[], object]] = {}
    for name in recipe.indexes:
        contender = CONTENDERS[name]
        try:
            index = _built(name, contender, case, k, kept)
        except InputError as error:
            rows.append({"name": name, "reason": str(error)})
            continue
        tuned = tune(index, contender, case, tuning, tuning_truth, recipe.target)
        rows.append({"name": name, **tuned, **answered(index, case, asked, truth, contender)})
        searches[name] = _search(index, case.keys, asked, k)
    rounds = cold_rounds(searches, recipe.repeats, recipe.cold_bytes).document()
    samples = rounds.pop("samples_s")
    return {
        "case": case.name,
        "keys": n,
        "k": k,
        "heads": [case.queries.shape[0], case.keys.shape[0]],
        "head_dim": case.keys.shape[2],
        "top_mass": float(truth.mass.mean()),
        "indexes": [row | ({"samples_s": samples[row["name"]]} if row["name"] in samples else {}) for row in rows],
        **rounds,
    }


def _built(name: str, contender: Contender, case: Case, k: int, kept: dict[str, Index]) -> Index:
    if name in kept:
        return kept[name]
    n = case.keys.shape[1]
    if contender.most_rows is not None and n > contender.most_rows:
        raise InputError(f"its build takes too long for {n} keys of a head; it is measured up to {contender.most_rows}")
    index = contender.build(case, k)
    if not contender.by_k:
        kept[name] = index
    return index


def tune(
    index: Index, contender: Contender, case: Case, queries: Tensor, truth: Truth, target: float
) -> dict[str, Any]:
    """Set the smallest value of the knob with which recall reaches the target, or the largest there is.

    Returns:
        "knob", "value" and whether it was "reached"; nothing where there is no knob.
    """
    if contender.knob is None:
        return {}
    k = truth.ids.shape[2]
    values = contender.values(case.keys.shape[1], k)

    def reaches(value: int) -> bool:
        contender.turn(index, value)
        found = torch.stack([index.search(of, case.keys, k)[0] for of in queries])
        return recall(found, truth.ids) >= target

    place = bisect_left(values, True, key=reaches)  # recall grows with the knob
    value = values[min(place, len(values) - 1)]
    contender.turn(index, value)
    return {"knob": contender.knob, "value": value, "reached": place < len(values)}


def answered(index: Index, case: Case, queries: Tensor, truth: Truth, contender: Contender) -> dict[str, Any]:
    """What searches find, and what they read for it."""
    k, (num_kv_heads, n, head_dim) = truth.ids.shape[2], case.keys.shape
    before = index.statistics()
    found = torch.stack([index.search(of, case.keys, k)[0] for of in queries])
    after = index.statistics()
    keys_scored = after["scanned"] * after["searches"] - before["scanned"] * before["searches"]
    scanned = keys_scored / (after["searches"] - before["searches"])
    mass = torch.stack([mass_of(case, *each) for each in zip(queries, found, truth.lse, strict=True)])
    heads, row_bytes = num_kv_heads if contender.shared else queries.shape[1], contender.row_bytes
    return {
        "recall": recall(found, truth.ids),
        "mass_recall": float((mass / truth.mass).clamp_max(1).mean()),
        "worst_mass_recall": float((mass / truth.mass).clamp_max(1).mean(0).min()),  # of a query head
        "scanned": scanned / n,
        "num_bytes": None
        if row_bytes is None
        else int(heads * scanned * row_bytes(head_dim, case.keys.element_size())),
        "bytes_per_key": after["bytes"] / (num_kv_heads * n),
        "statistics": after,
    }


def _search(index: Index, keys: Tensor, queries: Tensor, k: int) -> Callable[[], object]:
    """One search of all heads, of another token each time."""
    tokens = cycle(queries)
    return lambda: index.search(next(tokens), keys, k)
