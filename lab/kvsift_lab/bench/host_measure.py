"""Times of attention of a decode step in one layer, on the host.

Keys and queries are those of a synthetic set (``index_data``). Values are random: times do not depend on them. The
floor of a variant is the bytes that it must read over the bandwidth of the same rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvsift import native
from kvsift.errors import InputError
from kvsift.kernels.page_summary import summarise
from kvsift.native.sketch import sketches_read
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.host import NO_INDEX, HostRecipe
from kvsift_lab.bench.host_report import point_text
from kvsift_lab.bench.host_sketches import sketch_variants
from kvsift_lab.bench.host_timing import cold_rounds
from kvsift_lab.bench.host_variants import (
    AttentionInputs,
    Variant,
    native_variants,
    retrieval_variants,
    torch_variants,
)
from kvsift_lab.bench.index_cases import Case, synthetic
from kvsift_lab.bench.index_contenders import CONTENDERS
from kvsift_lab.bench.machine import host_environment


class HostBench(Bench):
    """Attention of a recipe on this processor."""

    recipe: HostRecipe
    kind = "host"

    def environment(self) -> dict[str, Any]:
        return host_environment()

    def points(self) -> Sequence[int]:
        return sorted(self.recipe.contexts)

    def measure(self, point: int) -> dict[str, Any]:
        recipe = self.recipe
        sizes = recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim, recipe.samples, 1
        case = synthetic(recipe.data, point, *sizes)
        layer = attention_inputs(case, recipe.page_size)
        variants = list(torch_variants(layer, recipe.budget, recipe.tokens))
        facts: dict[str, Any] = {"missing": []}
        if native.available():
            variants += native_variants(layer, recipe.budget, recipe.tokens)
            variants += self._sketches(layer, facts)
            variants += self._retrieval(case, layer, facts)
        else:
            facts["missing"].append(f"everything native: {native.why_missing()}")
        runs = {variant.name: variant.run for variant in variants}
        rounds = cold_rounds(runs, recipe.repeats, recipe.cold_bytes).document()
        samples = rounds.pop("samples_s")
        facts["variants"] = [
            {"name": v.name, "part": v.part, "num_bytes": v.num_bytes, "samples_s": samples[v.name]} for v in variants
        ]
        return facts | rounds

    def _sketches(self, layer: AttentionInputs, facts: dict[str, Any]) -> list[Variant]:
        """Variants by sketches, where the core reads pages of this size."""
        if sketches_read(layer.page_size, layer.keys.shape[2]):
            return list(sketch_variants(layer, self.recipe.sketch_tokens))
        facts["missing"].append(f"sketches: the core reads none of pages of {layer.page_size} tokens")
        return []

    def _retrieval(self, case: Case, layer: AttentionInputs, facts: dict[str, Any]) -> list[Variant]:
        """Variants of an index; what it says about itself, or why it is missing, goes to ``facts``."""
        if self.recipe.index == NO_INDEX:
            return []
        try:
            index = CONTENDERS[self.recipe.index].build(case, self.recipe.top)
        except InputError as error:
            facts["missing"].append(f"retrieval step: {error}")
            return []
        variants = list(retrieval_variants(layer, index, self.recipe.top))
        facts["index"] = index.statistics()
        return variants

    def text(self, point: dict[str, Any], result: dict[str, Any]) -> str:
        return point_text(point)


def attention_inputs(case: Case, page_size: int) -> AttentionInputs:
    """Return a case with random values, on huge pages where the system has them."""
    keys = case.keys
    values = torch.randn(keys.shape, generator=torch.Generator().manual_seed(0)).to(keys.dtype)
    pages = keys.shape[1] // page_size
    rows = summarise("minmax", keys[:, : pages * page_size].unflatten(1, (pages, page_size)))
    if native.available():
        for tensor in (keys, values, rows):
            native.advise_huge(tensor)
    return AttentionInputs(case.queries[:, 0].contiguous(), keys, values, rows, page_size, case.scale)
