"""Attention of a decode step in one layer, on the host: torch's forms, the compiled core's, and the step of an index.

Keys and queries are those of a synthetic set (``index_data``), values are random: what attention takes does not depend
on them, only what an index scans does. Every variant has a floor, the bytes that it must read over the bandwidth of
the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvsift import native
from kvsift.benchmarks.host_timing import cold_rounds
from kvsift.benchmarks.host_variants import Layer, Variant, native_variants, retrieval_variants, torch_variants
from kvsift.benchmarks.index_cases import SYNTHETIC, Case, synthetic
from kvsift.benchmarks.index_contenders import CONTENDERS
from kvsift.benchmarks.prefill_layer import COLD_BYTES
from kvsift.errors import InputError, unknown
from kvsift.kernels.page_summary import summarise

NO_INDEX = "none"


@dataclass(frozen=True)
class Recipe:
    """Everything a result depends on.

    Attributes:
        contexts: cached tokens.
        num_query_heads, num_kv_heads, head_dim: of the layer.
        budget: tokens of a selection of pages.
        page_size: tokens per page.
        tokens: keys per query head of a selection of tokens.
        index: what finds the ``top`` keys of a whole retrieval step, a name of ``CONTENDERS``, or "none".
        top: keys per query head that it finds.
        data: set that queries and keys are drawn from.
        samples: prompt queries per query head that an index may learn from.
        repeats: samples of each variant.
        cold_bytes: read before every sample.
    """

    contexts: tuple[int, ...]
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    budget: int = 2048
    page_size: int = 16
    tokens: tuple[int, ...] = (100, 2000)
    index: str = "auto"
    top: int = 100
    data: str = "S"
    samples: int = 2048
    repeats: int = 20
    cold_bytes: int = COLD_BYTES

    def __post_init__(self) -> None:
        if not self.contexts:
            raise InputError("there is nothing to measure: name at least one context.")
        if self.num_query_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_query_heads} query heads must be a multiple of the KV heads, {self.num_kv_heads}."
            )
        if self.data not in SYNTHETIC:
            raise unknown("data set", self.data, SYNTHETIC)
        if self.budget < self.page_size:
            raise InputError(f"a budget of {self.budget} tokens is less than a page of {self.page_size}; give more.")
        if self.index not in (NO_INDEX, *CONTENDERS):
            raise unknown("index", self.index, [NO_INDEX, *CONTENDERS])
        if short := [context for context in self.contexts if context < 2 * self.budget]:
            raise InputError(
                f"{short[0]} tokens are less than twice the budget, {self.budget}: there is little to select. Give "
                "longer --contexts, or a smaller --budget."
            )


def head(recipe: Recipe) -> dict[str, Any]:
    """What a result file begins with."""
    level = native.level() if native.available() else ""
    threads = torch.get_num_threads()
    return {"kind": "host", "recipe": asdict(recipe), "threads": threads, "level": level}


@torch.inference_mode()
def run(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Context by context as they are measured; variants that cannot run with their reason."""
    for context in sorted(recipe.contexts):
        sizes = recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim, recipe.samples, 1
        case = synthetic(recipe.data, context, *sizes)
        layer = make_layer(case, recipe.page_size)
        variants: list[Variant] = [*torch_variants(layer, recipe.budget, recipe.tokens)]
        point: dict[str, Any] = {"context": context, "missing": []}
        if native.available():
            variants += native_variants(layer, recipe.budget, recipe.tokens)
            if recipe.index != NO_INDEX:
                try:
                    index = CONTENDERS[recipe.index].build(case, recipe.top)
                    variants += retrieval_variants(layer, index, recipe.top)
                    point["index"] = index.statistics()
                except InputError as error:
                    point["missing"].append(f"retrieval step: {error}")
        else:
            point["missing"].append(f"everything native: {native.why_missing()}")
        rounds = cold_rounds({each.name: each.run for each in variants}, recipe.repeats, recipe.cold_bytes).document()
        samples = rounds.pop("samples_s")
        point["variants"] = [
            {"name": e.name, "part": e.part, "num_bytes": e.num_bytes, "samples_s": samples[e.name]} for e in variants
        ]
        yield point | rounds


def make_layer(case: Case, page_size: int) -> Layer:
    """A case with random values, on huge pages where the system has them."""
    keys = case.keys
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0)).to(keys.dtype)
    pages = keys.shape[1] // page_size
    rows = summarise("minmax", keys[:, : pages * page_size].unflatten(1, (pages, page_size)))
    if native.available():
        for tensor in (keys, values, rows):
            native.advise_huge(tensor)
    return Layer(case.queries[:, 0].contiguous(), keys, values, rows, page_size, case.scale)
