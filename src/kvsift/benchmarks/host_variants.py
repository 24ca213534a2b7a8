"""Ways to do the parts of a decode step in one layer, on the host: torch's forms, the compiled core's, an index's.

Each has a floor, the bytes that it must read. Torch's forms of dense attention are its default for grouped queries and
the best that we know; those of a sparse step copy what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvsift import native
from kvsift.indexes.base import Index
from kvsift.kernels.page_summary import SUMMARIES


class Variant(NamedTuple):
    """One way to do a part of the step."""

    name: str
    part: str  # what it does: variants of a part are comparable
    num_bytes: int  # that must be read
    run: Callable[[], object]


class Layer(NamedTuple):
    """What a step reads."""

    queries: Tensor  # [num_query_heads, head_dim]
    keys: Tensor  # [num_kv_heads, length, head_dim]
    values: Tensor
    rows: Tensor  # [num_kv_heads, num_pages, 2 * head_dim], maxima and minima of whole pages
    page_size: int
    scale: float

    @property
    def grouped(self) -> Tensor:
        """[num_kv_heads, group_size, head_dim]."""
        return self.queries.unflatten(0, (len(self.keys), -1))

    def bytes_of(self, num_tokens: int, heads: int) -> int:
        """Of keys and values."""
        return 2 * heads * num_tokens * self.keys.shape[2] * self.keys.element_size()


def torch_variants(layer: Layer, budget: int, tokens: Sequence[int]) -> Iterator[Variant]:
    """The forms that torch offers, the default and the best that we know."""
    q, k, v, scale = layer.queries, layer.keys, layer.values, layer.scale
    grouped, scaled = layer.grouped, layer.grouped * scale
    num_kv_heads, length, head_dim = k.shape
    dense = layer.bytes_of(length, num_kv_heads)

    def of_groups(keys: Tensor, values: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(scaled, keys.mT).softmax(-1), values)

    def with_gqa() -> Tensor:
        own, keys, values = q[None, :, None], k[None], v[None]
        return scaled_dot_product_attention(own, keys, values, scale=scale, enable_gqa=True)

    def as_rows() -> Tensor:
        return scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)

    yield Variant("torch sdpa, enable_gqa", "dense", dense, with_gqa)
    yield Variant("torch sdpa, group as rows", "dense", dense, as_rows)
    yield Variant("torch bmm-softmax-bmm", "dense", dense, lambda: of_groups(k, v))

    size, num_pages = layer.page_size, layer.rows.shape[1]
    count = budget // size
    features = SUMMARIES["minmax"].features(scaled.float()).to(k.dtype)
    paged = [t[:, : num_pages * size].reshape(num_kv_heads * num_pages, size * head_dim) for t in (k, v)]
    offsets = torch.arange(num_kv_heads).unsqueeze(1) * num_pages

    def pages() -> Tensor:
        best = torch.bmm(features, layer.rows.mT).amax(1).topk(count, sorted=False).indices
        places = (best + offsets).flatten()
        chosen = (t.index_select(0, places).view(num_kv_heads, count * size, head_dim) for t in paged)
        return of_groups(*chosen)

    of_pages = layer.rows.numel() * layer.rows.element_size() + layer.bytes_of(count * size, num_kv_heads)
    yield Variant("torch pages per KV head", "pages", of_pages, pages)

    flat = [t.reshape(num_kv_heads * length, head_dim) for t in (k, v)]
    group = q.shape[0] // num_kv_heads
    own = (q * scale).unsqueeze(1)
    for number, ids in _token_lists(layer, tokens):
        places = (ids + (torch.arange(q.shape[0]) // group * length).unsqueeze(1)).flatten()

        def gathered(places: Tensor = places, number: int = number) -> Tensor:
            keys, values = (t.index_select(0, places).view(-1, number, head_dim) for t in flat)
            return torch.bmm(torch.bmm(own, keys.mT).softmax(-1), values)

        yield Variant(f"torch {number} tokens per query head", f"{number} tokens", _gathered(layer, number), gathered)


def native_variants(layer: Layer, budget: int, tokens: Sequence[int]) -> Iterator[Variant]:
    """What the compiled core does, and the parts of its page selection."""
    q, k, v, scale = layer.queries, layer.keys, layer.values, layer.scale
    num_query_heads, num_kv_heads, length = q.shape[0], k.shape[0], k.shape[1]
    size = layer.page_size
    count = budget // size
    of_rows, of_units = layer.rows.numel() * layer.rows.element_size(), layer.bytes_of(count * size, num_kv_heads)
    yield Variant(
        "native dense", "dense", layer.bytes_of(length, num_kv_heads), lambda: native.attend_dense(q, k, v, scale)
    )

    def pages(num_selections: int) -> object:
        units = native.choose_pages(q, layer.rows, scale, count, num_selections)
        return native.attend_units(q, k, v, units, size, (), scale)

    yield Variant("native pages per KV head", "pages", of_rows + of_units, lambda: pages(num_kv_heads))
    group = num_query_heads // num_kv_heads
    if group > 1:
        own = of_rows + min(group * of_units, layer.bytes_of(length, num_kv_heads))
        yield Variant("native pages per query head", "pages per query head", own, lambda: pages(num_query_heads))
    fixed = native.choose_pages(q, layer.rows, scale, count, num_kv_heads)
    yield Variant("of it: page scores", "scores", of_rows, lambda: native.page_scores(q, layer.rows, scale))
    yield Variant(
        "of it: scores and top-k",
        "choice",
        of_rows,
        lambda: native.choose_pages(q, layer.rows, scale, count, num_kv_heads),
    )
    yield Variant(
        "of it: attention over pages",
        "attention",
        of_units,
        lambda: native.attend_units(q, k, v, fixed, size, (), scale),
    )
    for number, ids in _token_lists(layer, tokens):
        yield Variant(
            f"native {number} tokens per query head", f"{number} tokens", _gathered(layer, number),
            lambda ids=ids: native.attend_units(q, k, v, ids, 1, (), scale),  # type: ignore[misc]
        )  # fmt: skip


def retrieval_variants(layer: Layer, index: Index, top: int) -> Iterator[Variant]:
    """Search for the ``top`` keys of each query head and attention over them, together and apart."""
    q, k, v, scale = layer.queries, layer.keys, layer.values, layer.scale
    num_kv_heads, length, head_dim = k.shape
    before = index.statistics()
    ids = index.search(q, k, top)[0]
    after = index.statistics()
    scanned = after["scanned"] * after["searches"] - before["scanned"] * before["searches"]
    rows = min(scanned * q.shape[0], num_kv_heads * length)  # heads of a group may read a key together
    of_search, of_found = int(rows * head_dim * k.element_size()), _gathered(layer, top)

    def attend(ids: Tensor) -> object:
        return native.attend_units(q, k, v, ids, 1, (), scale)

    yield Variant("retrieval step", "retrieval", of_search + of_found, lambda: attend(index.search(q, k, top)[0]))
    yield Variant("of it: search", "search", of_search, lambda: index.search(q, k, top))
    yield Variant("of it: attention over the found", "found", of_found, lambda: attend(ids))


def _token_lists(layer: Layer, tokens: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Random tokens of each query head, int64 [num_query_heads, count], ascending."""
    generator = torch.Generator().manual_seed(0)
    length = layer.keys.shape[1]
    for number in tokens:
        if number <= length:
            drawn = [torch.randperm(length, generator=generator)[:number].sort().values for _ in layer.queries]
            yield number, torch.stack(drawn)


def _gathered(layer: Layer, number: int) -> int:
    """Bytes of a list of tokens for each query head."""
    return layer.bytes_of(number, layer.queries.shape[0])
