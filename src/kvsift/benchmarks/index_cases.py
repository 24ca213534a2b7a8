"""What indexes are measured on: keys of one layer, prompt queries to learn from, decode queries and what they seek."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift import native
from kvsift.benchmarks.index_data import index_data
from kvsift.benchmarks.qk_dump import Dump
from kvsift.errors import InputError
from kvsift.indexes.samples import QuerySamples
from kvsift.types import Rope

SINKS, WINDOW = 128, 512  # of a document's tokens, always visible and in no index (arXiv 2409.10516)
SYNTHETIC = ("R", "S", "T")
LOGITS = 1 << 26  # in memory at a time


class Case(NamedTuple):
    """One layer. Decoding begins behind the last key and the last sample."""

    name: str
    keys: Tensor  # [num_kv_heads, n, head_dim]
    samples: QuerySamples
    queries: Tensor  # [num_query_heads, num_decode, head_dim]
    rope: Rope | None
    scale: float
    first: int = 0  # position of the first key
    window: int = WINDOW  # most recent positions that a query sees without an index

    @property
    def group_size(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    def asked(self, start: int, step: int) -> Tensor:
        """Every ``step``-th token's queries, [tokens, num_query_heads, head_dim]: as a decode step asks them."""
        return self.queries[:, start::step].transpose(0, 1).contiguous()

    def heads(self) -> Iterator[Case]:
        """A case for each KV head and its group."""
        for number, keys in enumerate(self.keys):
            of = slice(number * self.group_size, (number + 1) * self.group_size)
            samples = QuerySamples(self.samples.queries[of], self.samples.positions)
            name = f"{self.name} head {number}"
            yield self._replace(name=name, keys=keys.unsqueeze(0), samples=samples, queries=self.queries[of])


def _spread(count: int, most: int) -> Tensor:
    """At most so many of ``count`` places, evenly spread, the last one among them."""
    kept = min(count, most)
    return (torch.arange(kept) + 1) * count // max(kept, 1) - 1


class Truth(NamedTuple):
    """Exact results for some tokens' queries."""

    ids: Tensor  # int64 [tokens, num_query_heads, k], best first
    mass: Tensor  # float32 [tokens, num_query_heads], softmax mass of these keys among all
    lse: Tensor  # float32 [tokens, num_query_heads]


def synthetic(
    kind: str, context: int, num_query_heads: int, num_kv_heads: int, head_dim: int, samples: int, num_decode: int,
    seed: int = 0,
) -> Case:  # fmt: skip
    """A layer of a synthetic set (``index_data``), all of whose keys are indexed."""
    made = index_data(
        kind, context, num_kv_heads=num_kv_heads, group_size=num_query_heads // num_kv_heads, head_dim=head_dim,
        num_samples=min(samples, context), num_queries=num_decode, seed=seed,
    )  # fmt: skip
    learnt = QuerySamples(made.samples, made.positions)
    return Case(kind, _on_huge_pages(made.keys), learnt, made.queries, made.rope, head_dim**-0.5)


def of_dump(dump: Dump, layer: int, samples: int, num_decode: int, sinks: int = SINKS, window: int = WINDOW) -> Case:
    """A layer of a dump without its sinks and window: at most so many of its sampled and of its decode queries.

    Raises:
        InputError: if nothing is left, or too little was asked.
    """
    held = dump.layer(layer)
    rows = dump.length - sinks - window
    if rows < 1:
        raise InputError(
            f"{dump.path} holds {dump.length} tokens, of which {sinks} sinks and a window of {window} are in no index. "
            "Dump a longer document."
        )
    asked = held.decode_queries.shape[1]
    if asked < 2:
        raise InputError(f"{dump.path} holds {asked} decode query; ask more when dumping, to tune and to test apart.")
    learnt, chosen = _spread(len(held.positions), samples), _spread(asked, num_decode)
    return Case(
        f"P {dump.name} layer {layer}",
        _on_huge_pages(held.keys[:, sinks : sinks + rows]),
        QuerySamples(held.queries[:, learnt], held.positions[learnt]),
        held.decode_queries[:, chosen],
        held.shape.rope,
        held.shape.scale,
        sinks,
        window,
    )


def _on_huge_pages(keys: Tensor) -> Tensor:
    """A copy, where the system has them: rows that are read here and there wait for addresses otherwise."""
    copy = torch.empty(keys.shape, dtype=keys.dtype)
    if native.available():
        native.advise_huge(copy)
    return copy.copy_(keys)


@torch.inference_mode()
def exact(case: Case, queries: Tensor, k: int) -> Truth:
    """The k best keys of queries [tokens, num_query_heads, head_dim], by float32 products."""
    tokens, num_query_heads, n = *queries.shape[:2], case.keys.shape[1]
    k = min(k, n)
    ids = torch.empty(tokens, num_query_heads, k, dtype=torch.int64)
    mass, lse = torch.empty(tokens, num_query_heads), torch.empty(tokens, num_query_heads)
    step = max(1, LOGITS // n)
    for head in range(num_query_heads):
        keys = case.keys[head // case.group_size].float().T
        for first in range(0, tokens, step):
            of = slice(first, first + step)
            logits = queries[of, head].float() @ keys * case.scale
            best = logits.topk(k)
            ids[of, head], lse[of, head] = best.indices, logits.logsumexp(-1)
            mass[of, head] = (best.values - lse[of, head].unsqueeze(-1)).exp().sum(-1)
    return Truth(ids, mass, lse)


def recall(found: Tensor, truth: Tensor) -> float:
    """Mean share of the true ids [.., k] among the found ones [.., any], -1 counting as nothing."""
    both = torch.cat([found, truth], -1).sort(-1).values
    hits = (both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)  # ids are unique on either side
    return float(hits.sum(-1).double().mean() / truth.shape[-1])


def mass_of(case: Case, queries: Tensor, found: Tensor, lse: Tensor) -> Tensor:
    """Softmax mass of keys found for one token: queries [num_query_heads, head_dim], found int64
    [num_query_heads, k], lse [num_query_heads] -> [num_query_heads]."""
    heads = torch.arange(len(queries)).unsqueeze(1) // case.group_size
    keys = case.keys[heads, found.clamp_min(0)].float()  # [num_query_heads, k, head_dim]
    logits = torch.einsum("hkd,hd->hk", keys, queries.float()) * case.scale
    return (logits - lse.unsqueeze(1)).exp().masked_fill(found < 0, 0).sum(1)
