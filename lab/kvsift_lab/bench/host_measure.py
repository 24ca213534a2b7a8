"""Times of the parts of a decode step in one layer, on the host: by torch, by the compiled core, by an index.

Keys and queries are those of a synthetic set (``index_data``). Values are random: times do not depend on them. The
floor of a variant is the bytes that it must read over the bandwidth of the same rounds. Torch's forms of dense
attention are its default for grouped queries and the fastest known; those of a sparse step copy the selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvsift import native
from kvsift.errors import InputError
from kvsift.indexes.base import Index
from kvsift.kernels.page_summary import SUMMARIES, summarise
from kvsift.kernels.sketch import SKETCHES, sketch_rows
from kvsift.native.memory import huge_empty
from kvsift.native.sketch_format import SketchLayout, sketches_read
from kvsift.types import Part
from kvsift_lab.bench import host_steps
from kvsift_lab.bench.bench import Bench
from kvsift_lab.bench.host import NO_INDEX, HostRecipe, point_text
from kvsift_lab.bench.host_timing import cold_rounds
from kvsift_lab.bench.index_cases import CONTENDERS, Case, keys_scored, synthetic
from kvsift_lab.numbers import digits


class HostBench(Bench):
    """Attention of a recipe on this processor."""

    recipe: HostRecipe
    kind = "host"

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
            variants += self._steps(layer, facts)
            variants += self._retrieval(case, layer, facts)
        else:
            facts["missing"].append(f"everything native: {native.why_missing()}")
        runs = {variant.name: variant.run for variant in variants}
        steps = [variant.name for variant in variants if variant.part == "step"]
        rounds = cold_rounds(runs, recipe.repeats, recipe.cold_bytes, again=steps).document()
        samples = rounds.pop("samples_s")
        facts["variants"] = [
            {"name": v.name, "part": v.part, "num_bytes": v.num_bytes,
             "samples_s": digits([seconds / v.layers for seconds in samples[v.name]])}
            for v in variants
        ]  # fmt: skip
        return facts | rounds

    def _sketches(self, layer: AttentionInputs, facts: dict[str, Any]) -> list[Variant]:
        """Variants by sketches, where the core reads pages of this size."""
        if sketches_read(layer.page_size, layer.keys.shape[2]):
            return list(sketch_variants(layer, self.recipe.sketch_tokens))
        facts["missing"].append(f"sketches: the core reads none of pages of {layer.page_size} tokens")
        return []

    def _steps(self, layer: AttentionInputs, facts: dict[str, Any]) -> list[Variant]:
        """Variants of a layer in a step of the core, which estimates from sketches of such pages."""
        recipe = self.recipe
        if not sketches_read(layer.page_size, layer.keys.shape[2]) or layer.keys.dtype != torch.bfloat16:
            facts["missing"].append("steps of the core: it reads no sketches of such pages, or no such keys")
            return []
        pools = host_steps.LAYERS * (2 * layer.dense_bytes + layer.summary_bytes + layer.sketch_bytes(1))
        if pools > 0.9 * (free := psutil.virtual_memory().available):
            facts["missing"].append(f"steps of the core: they need {pools / 1e9:.1f} GB, and {free / 1e9:.1f} are free")
            return []
        needed = {
            host_steps.NOTHING: layer.kv_bytes(64, recipe.num_kv_heads),
            host_steps.DENSE: layer.dense_bytes,
            host_steps.QUEST: layer.summary_bytes + layer.kv_bytes(recipe.budget, recipe.num_kv_heads),
            host_steps.SKETCH: layer.sketch_bytes(1) + layer.kv_bytes(recipe.sketch_tokens, recipe.num_kv_heads),
        }
        try:
            runs = list(host_steps.step_variants(recipe, layer.keys.shape[1]))
        except InputError as error:
            facts["missing"].append(f"steps of the core: {error}")
            return []
        return [Variant(name, "step", needed[name], run, host_steps.LAYERS) for name, run in runs]

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


class Variant(NamedTuple):
    """An implementation of a part of the step."""

    name: str
    part: str  # variants of one part are comparable
    num_bytes: int  # to read, at least, in a layer
    run: Callable[[], object]
    layers: int = 1  # of a run


class AttentionInputs(NamedTuple):
    """Inputs of a decode step."""

    queries: Tensor  # [num_query_heads, head_dim]
    keys: Tensor  # [num_kv_heads, length, head_dim]
    values: Tensor
    rows: Tensor  # [num_kv_heads, num_pages, 2 * head_dim], maxima and minima of whole pages
    page_size: int
    scale: float

    @property
    def grouped(self) -> Tensor:
        """Queries as [num_kv_heads, group_size, head_dim]."""
        return self.queries.unflatten(0, (len(self.keys), -1))

    def kv_bytes(self, num_tokens: int, heads: int) -> int:
        """Return the bytes of keys and values."""
        return 2 * heads * num_tokens * self.keys.shape[2] * self.keys.element_size()

    @property
    def dense_bytes(self) -> int:
        return self.kv_bytes(self.keys.shape[1], len(self.keys))

    @property
    def summary_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def sketch_bytes(self, bits: int) -> int:
        """Return the bytes of the sketches of whole pages."""
        num_kv_heads, length, head_dim = self.keys.shape
        return num_kv_heads * (length // self.page_size) * SketchLayout(bits, head_dim, self.page_size).width


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


def torch_variants(layer: AttentionInputs, budget: int, tokens: Sequence[int]) -> Iterator[Variant]:
    """Return torch's forms: its default, and the fastest known."""
    q, k, v, scale, grouped = layer.queries, layer.keys, layer.values, layer.scale, layer.grouped

    def with_gqa() -> Tensor:
        return scaled_dot_product_attention(q[None, :, None], k[None], v[None], scale=scale, enable_gqa=True)

    def as_rows() -> Tensor:
        return scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)

    scaled = grouped * scale
    yield Variant("torch sdpa, enable_gqa", "dense", layer.dense_bytes, with_gqa)
    yield Variant("torch sdpa, group as rows", "dense", layer.dense_bytes, as_rows)
    yield Variant("torch bmm-softmax-bmm", "dense", layer.dense_bytes, lambda: _products(scaled, k, v))
    yield _torch_pages(layer, budget // layer.page_size)
    yield from _torch_tokens(layer, tokens)


def _products(scaled: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(scaled, keys.mT).softmax(-1), values)


def _torch_pages(layer: AttentionInputs, count: int) -> Variant:
    """Attention over the best pages, copied."""
    scaled, size = layer.grouped * layer.scale, layer.page_size
    num_kv_heads, num_pages, head_dim = len(layer.keys), layer.rows.shape[1], layer.keys.shape[2]
    features = SUMMARIES["minmax"].features(scaled.float()).to(layer.keys.dtype)
    shape = num_kv_heads * num_pages, size * head_dim
    pools = [t[:, : num_pages * size].reshape(shape) for t in (layer.keys, layer.values)]
    offsets = torch.arange(num_kv_heads).unsqueeze(1) * num_pages

    def pages() -> Tensor:
        best = torch.bmm(features, layer.rows.mT).amax(1).topk(count, sorted=False).indices
        ids = (best + offsets).flatten()
        return _products(scaled, *(t.index_select(0, ids).view(num_kv_heads, count * size, head_dim) for t in pools))

    num_bytes = layer.summary_bytes + layer.kv_bytes(count * size, num_kv_heads)
    return Variant("torch pages per KV head", "pages", num_bytes, pages)


def _torch_tokens(layer: AttentionInputs, tokens: Sequence[int]) -> Iterator[Variant]:
    """Attention over a list of tokens for each query head, copied."""
    num_heads, (num_kv_heads, length, head_dim) = len(layer.queries), layer.keys.shape
    pools = [t.reshape(num_kv_heads * length, head_dim) for t in (layer.keys, layer.values)]
    scaled = (layer.queries * layer.scale).unsqueeze(1)
    offsets = (torch.arange(num_heads) // (num_heads // num_kv_heads) * length).unsqueeze(1)

    def gathered(ids: Tensor, number: int) -> Tensor:
        return _products(scaled, *(t.index_select(0, ids).view(-1, number, head_dim) for t in pools))

    for number, ids in _token_lists(layer, tokens):
        run = partial(gathered, (ids + offsets).flatten(), number)
        yield Variant(f"torch {number} tokens per query head", f"{number} tokens", _list_bytes(layer, number), run)


def native_variants(layer: AttentionInputs, budget: int, tokens: Sequence[int]) -> Iterator[Variant]:
    """Return the variants of the compiled core, and the parts of its page selection."""
    q, k, v, scale, size = layer.queries, layer.keys, layer.values, layer.scale, layer.page_size
    num_query_heads, num_kv_heads, count = len(q), len(k), budget // size
    summaries, selected = layer.summary_bytes, layer.kv_bytes(count * size, num_kv_heads)

    def select(num_selections: int) -> Tensor:
        return native.choose_pages(q, layer.rows, scale, count, num_selections)

    def attend(units: Tensor, unit_size: int) -> object:
        return native.attend_units(q, k, v, units, unit_size, (), scale)

    def pages(num_selections: int) -> object:
        return attend(select(num_selections), size)

    yield Variant("native dense", "dense", layer.dense_bytes, lambda: native.attend_dense(q, k, v, scale))
    yield Variant("native pages per KV head", "pages", summaries + selected, lambda: pages(num_kv_heads))
    group = num_query_heads // num_kv_heads
    if group > 1:
        num_bytes = summaries + min(group * selected, layer.dense_bytes)
        yield Variant("native pages per query head", "pages per query head", num_bytes, lambda: pages(num_query_heads))
    units = select(num_kv_heads)
    yield Variant("of it: page scores", "scores", summaries, lambda: native.page_scores(q, layer.rows, scale))
    yield Variant("of it: scores and top-k", "choice", summaries, lambda: select(num_kv_heads))
    yield Variant("of it: attention over pages", "attention", selected, lambda: attend(units, size))
    for number, ids in _token_lists(layer, tokens):
        name, part = f"native {number} tokens per query head", f"{number} tokens"
        yield Variant(name, part, _list_bytes(layer, number), partial(attend, ids, 1))


def retrieval_variants(layer: AttentionInputs, index: Index, top: int) -> Iterator[Variant]:
    """Return search of the ``top`` keys of each query head and attention over them, together and separate."""
    q, k, v, scale = layer.queries, layer.keys, layer.values, layer.scale
    num_kv_heads, length, head_dim = k.shape
    before = index.statistics()
    ids = index.search(q, k, top)[0]
    after = index.statistics()
    rows = min(keys_scored(before, after) * q.shape[0], num_kv_heads * length)  # heads of a group may share a read
    search_bytes, list_bytes = int(rows * head_dim * k.element_size()), _list_bytes(layer, top)

    def attend(ids: Tensor) -> object:
        return native.attend_units(q, k, v, ids, 1, (), scale)

    yield Variant("retrieval step", "retrieval", search_bytes + list_bytes, lambda: attend(index.search(q, k, top)[0]))
    yield Variant("of it: search", "search", search_bytes, lambda: index.search(q, k, top))
    yield Variant("of it: attention over the found", "found", list_bytes, lambda: attend(ids))


def _token_lists(layer: AttentionInputs, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Return random tokens of each query head, int64 [num_query_heads, count], ascending."""
    generator = torch.Generator().manual_seed(0)
    length = layer.keys.shape[1]
    for number in tokens:
        if number <= length:
            drawn = [torch.randperm(length, generator=generator)[:number].sort().values for _ in layer.queries]
            yield number, torch.stack(drawn)


def _list_bytes(layer: AttentionInputs, number: int) -> int:
    """Return the bytes of a list of tokens for each query head."""
    return layer.kv_bytes(number, layer.queries.shape[0])


def sketch_variants(layer: AttentionInputs, tokens: int) -> Iterator[Variant]:
    """Return the steps that attend ``tokens`` tokens per KV head and estimate the rest, and their choice alone, by kind
    of sketch. Tokens of a page that is not full are no candidates."""
    num_kv_heads, length, head_dim = layer.keys.shape
    pages = length // layer.page_size
    count = min(tokens, pages * layer.page_size)
    paged = [t[:, : pages * layer.page_size].unflatten(1, (pages, layer.page_size)) for t in (layer.keys, layer.values)]
    for kind, bits in SKETCHES.items():
        layout = SketchLayout(bits, head_dim, layer.page_size)
        rows = huge_empty([num_kv_heads, pages, layout.width], torch.uint8)
        for head, row in enumerate(rows):  # one by one: temporary memory is many times that of the rows
            row.copy_(sketch_rows(bits, *(tensor[head : head + 1] for tensor in paged))[0])
        choose, attend = partial(_choose, layer, layout, rows, count), partial(_attend, layer, layout, rows, count)
        selected = layer.kv_bytes(count, num_kv_heads)
        yield Variant(f"native {kind} per KV head", "sketch", rows.numel() + selected, attend)
        yield Variant(f"of it: choice by {kind}", "sketched choice", rows.numel(), choose)


def _choose(layer: AttentionInputs, layout: SketchLayout, rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the chosen tokens of each KV head, and output and log-sum-exp of the rest."""
    num_tokens = rows.shape[1] * layer.page_size
    nothing = torch.full((len(layer.queries),), -torch.inf)  # is visible anyway
    return native.choose_sketched(
        layer.queries, rows, layout, layer.scale, 0, num_tokens, count, len(layer.keys), nothing
    )


def _attend(layer: AttentionInputs, layout: SketchLayout, rows: Tensor, count: int) -> Tensor:
    """Return attention over the chosen tokens, merged with the rest."""
    ids, values, lse = _choose(layer, layout, rows, count)
    output, seen_lse = native.attend_units(layer.queries, layer.keys, layer.values, ids, 1, (), layer.scale)
    seen = Part(output[None, :, None], seen_lse[None, :, None])
    return native.merge_estimate(seen, Part(values[None, :, None], lse[None, :, None]))[0].output[0, :, 0]
