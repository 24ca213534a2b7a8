"""Cases for indexes: keys of one layer, prompt queries to learn from, decode queries and their exact results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift import native
from kvsift.errors import InputError
from kvsift.indexes.samples import QuerySamples
from kvsift.types import Rope
from kvsift_lab.bench.index import SINKS, WINDOW
from kvsift_lab.bench.index_data import index_data
from kvsift_lab.bench.qk_dump import Dump

SYNTHETIC = ("R", "S", "T")
LOGITS = 1 << 26  # in memory at a time


class Case(NamedTuple):
    """One layer. Decoding starts behind the last key and the last sample."""

    name: str
    keys: Tensor  # [num_kv_heads, n, head_dim]
    samples: QuerySamples
    queries: Tensor  # [num_query_heads, num_decode, head_dim]
    rope: Rope | None
    scale: float
    first: int = 0  # position of the first key
    window: int = WINDOW  # most recent positions, visible without an index

    @property
    def group_size(self) -> int:
        return self.queries.shape[0] // self.keys.shape[0]

    def decode_queries(self, start: int, step: int) -> Tensor:
        """Return the queries of every ``step``-th token, [tokens, num_query_heads, head_dim]."""
        return self.queries[:, start::step].transpose(0, 1).contiguous()

    def heads(self) -> Iterator[Case]:
        """Return a case for each KV head and its group."""
        for number, keys in enumerate(self.keys):
            group = slice(number * self.group_size, (number + 1) * self.group_size)
            samples = QuerySamples(self.samples.queries[group], self.samples.positions)
            name = f"{self.name} head {number}"
            yield self._replace(name=name, keys=keys.unsqueeze(0), samples=samples, queries=self.queries[group])


def _spread(count: int, most: int) -> Tensor:
    """Return at most ``most`` of ``count`` positions, evenly spread, with the last one."""
    number = min(count, most)
    return (torch.arange(number) + 1) * count // max(number, 1) - 1


class Truth(NamedTuple):
    """Exact results for some tokens' queries."""

    ids: Tensor  # int64 [tokens, num_query_heads, k], best first
    mass: Tensor  # float32 [tokens, num_query_heads], softmax mass of these keys among all
    lse: Tensor  # float32 [tokens, num_query_heads]


def synthetic(
    kind: str, context: int, num_query_heads: int, num_kv_heads: int, head_dim: int, samples: int, num_decode: int,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Return a layer of a synthetic set (``index_data``); all keys are indexed."""
    data = index_data(
        kind, context, num_kv_heads=num_kv_heads, group_size=num_query_heads // num_kv_heads, head_dim=head_dim,
        num_samples=min(samples, context), num_queries=num_decode, seed=seed,
    )  # fmt: skip
    prompt = QuerySamples(data.samples, data.positions)
    return Case(kind, _on_huge_pages(data.keys), prompt, data.queries, data.rope, head_dim**-0.5)


def of_dump(dump: Dump, layer: int, samples: int, num_decode: int, sinks: int = SINKS, window: int = WINDOW) -> Case:
    """Return a layer of a dump without its sinks and window.

    Args:
        samples: sampled queries, at most.
        num_decode: decode queries, at most.

    Raises:
        InputError: if no key is left, or there are too few decode queries.
    """
    recorded = dump.layer(layer)
    rows = dump.length - sinks - window
    if rows < 1:
        raise InputError(
            f"{dump.path} has {dump.length} tokens, of which {sinks} sinks and a window of {window} are in no index. "
            "Dump a longer document."
        )
    num_queries = recorded.decode_queries.shape[1]
    if num_queries < 2:
        raise InputError(f"{dump.path} has {num_queries} decode query; dump more questions, to tune and to test apart.")
    prompt, decode = _spread(len(recorded.positions), samples), _spread(num_queries, num_decode)
    return Case(
        f"P {dump.name} layer {layer}",
        _on_huge_pages(recorded.keys[:, sinks : sinks + rows]),
        QuerySamples(recorded.queries[:, prompt], recorded.positions[prompt]),
        recorded.decode_queries[:, decode],
        recorded.shape.rope,
        recorded.shape.scale,
        sinks,
        window,
    )


def _on_huge_pages(keys: Tensor) -> Tensor:
    """Return a copy on huge pages where the system has them: scattered reads miss the TLB otherwise."""
    copy = torch.empty(keys.shape, dtype=keys.dtype)
    if native.available():
        native.advise_huge(copy)
    return copy.copy_(keys)


@torch.inference_mode()
def exact(case: Case, queries: Tensor, k: int) -> Truth:
    """Return the k best keys of queries [tokens, num_query_heads, head_dim], by float32 products."""
    tokens, num_query_heads, n = *queries.shape[:2], case.keys.shape[1]
    k = min(k, n)
    ids = torch.empty(tokens, num_query_heads, k, dtype=torch.int64)
    mass, lse = torch.empty(tokens, num_query_heads), torch.empty(tokens, num_query_heads)
    step = max(1, LOGITS // n)
    for head in range(num_query_heads):
        keys = case.keys[head // case.group_size].float().T
        for first in range(0, tokens, step):
            rows = slice(first, first + step)
            logits = queries[rows, head].float() @ keys * case.scale
            best = logits.topk(k)
            ids[rows, head], lse[rows, head] = best.indices, logits.logsumexp(-1)
            mass[rows, head] = (best.values - lse[rows, head].unsqueeze(-1)).exp().sum(-1)
    return Truth(ids, mass, lse)


def recall(found: Tensor, truth: Tensor) -> float:
    """Return the mean share of the true ids [.., k] among the found ones [.., any]; -1 is no id."""
    both = torch.cat([found, truth], -1).sort(-1).values
    hits = (both[..., 1:] == both[..., :-1]) & (both[..., 1:] >= 0)  # ids are unique on either side
    return float(hits.sum(-1).double().mean() / truth.shape[-1])


def mass_of(case: Case, queries: Tensor, found: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax mass of keys found for one token: queries [num_query_heads, head_dim], found int64
    [num_query_heads, k], lse [num_query_heads] -> [num_query_heads]."""
    heads = torch.arange(len(queries)).unsqueeze(1) // case.group_size
    keys = case.keys[heads, found.clamp_min(0)].float()  # [num_query_heads, k, head_dim]
    logits = torch.einsum("hkd,hd->hk", keys, queries.float()) * case.scale
    return (logits - lse.unsqueeze(1)).exp().masked_fill(found < 0, 0).sum(1)
