"""Synthetic queries and keys of one layer, to measure indexes: sets R, S and T.

R is Gaussian noise and has no structure to learn. S is peaky and has hubs: a few keys weigh for most queries, which
come from another distribution than the keys, as in the paper of RetrievalAttention (arXiv 2409.10516). T is diffuse:
many keys weigh a little, which is the hard case for a graph. Tokens are latent vectors, drawn once for the layer; each
head reads them through matrices of its own. Queries are held-out ones at positions from n on, and prefill ones before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.errors import InvalidValue, unknown
from kvsift.kernels.rerotate import rerotate
from kvsift.types import Rope

SYNTHETIC = ("R", "S", "T")
ROPE_BASE = 5e5
VOCABULARY = 20_000
COPIES, COPY_REACH = 0.3, 2000  # share of tokens that repeat one of the last tokens
SEGMENT = 64  # tokens of T that share a topic
DECODE_SPAN = 512  # positions that decode queries come from


class IndexData(NamedTuple):
    """One layer. Queries and keys are after RoPE, logit = q.k / sqrt(head_dim)."""

    keys: Tensor  # [num_kv_heads, n, d]
    samples: Tensor  # [num_query_heads, t, d], prefill queries
    positions: Tensor  # int64 [t], ascending, below n
    queries: Tensor  # [num_query_heads, m, d], decode queries
    query_positions: Tensor  # int64 [m], ascending, in [n, n + 512)
    rope: Rope


class _Text(NamedTuple):
    """Latents of tokens. ``length`` is n + 512: decode queries have a context too."""

    keys: Tensor  # [length, width], latents of the keys
    queries: Callable[[Tensor, torch.Generator], Tensor]  # positions [t] -> latents [t, width] of one query head


class _HeadMaps(NamedTuple):
    """Maps from latents to the heads of a set."""

    spectrum: float  # axis i of a head has weight i ** -spectrum
    spread: float  # of the part of keys that comes from latents
    focus: int  # latent axes of a query head
    temperature: float  # of queries
    unrelated: float  # share of the query map that is independent of the map of keys
    key_bias: float  # of 4 slow pairs of the keys
    query_bias: float  # of 4 slow pairs of the queries
    against: float  # weight of the negated key bias in queries


HEAD_MAPS = {
    "S": _HeadMaps(0.3, 2.5, 24, 0.8, 0.5, 2.0, 6.0, 1.5),
    "T": _HeadMaps(0.1, 2.7, 56, 0.36, 0.3, 0.5, 0.5, 0.0),
}


def index_data(
    kind: str, n: int, *, num_kv_heads: int = 8, group_size: int = 4, head_dim: int = 128, num_samples: int = 2048,
    num_queries: int = 32, seed: int = 0, dtype: torch.dtype = torch.bfloat16,
) -> IndexData:  # fmt: skip
    """Return a layer of set ``kind``: ``"R"``, ``"S"`` or ``"T"``.

    Args:
        kind: which set.
        n: keys per KV head.
        num_kv_heads, group_size, head_dim: of the layer; group_size query heads read one KV head.
        num_samples: prefill queries per query head, spread evenly over the positions.
        num_queries: decode queries per query head, at random positions of [n, n + 512).
        seed: of all random numbers.
        dtype: of queries and keys.

    Raises:
        InputError: for an unknown set, no keys, or an odd or too small head_dim.
    """
    if kind not in SYNTHETIC:
        raise unknown("data set", kind, SYNTHETIC)
    if n < 1 or head_dim < 16 or head_dim % 2:
        raise InvalidValue(f"n = {n}, head_dim = {head_dim}: a data set needs n >= 1 and an even head_dim >= 16.")
    generator = torch.Generator().manual_seed(seed)
    rope = Rope(ROPE_BASE ** (-torch.arange(0, head_dim, 2) / head_dim))
    positions = torch.arange(num_samples) * n // num_samples
    query_positions = n + torch.randint(DECODE_SPAN, (num_queries,), generator=generator).sort().values
    all_positions = torch.cat([positions, query_positions])
    num_query_heads = num_kv_heads * group_size
    keys = torch.empty(num_kv_heads, n, head_dim, dtype=dtype)
    queries = torch.empty(num_query_heads, len(all_positions), head_dim, dtype=dtype)
    if kind == "R":
        keys.copy_(torch.randn(keys.shape, generator=generator))
        queries.copy_(torch.randn(queries.shape, generator=generator))
    else:
        text = (_hubby_text if kind == "S" else _diffuse_text)(n, generator)
        for head in range(num_kv_heads):
            at = slice(head * group_size, (head + 1) * group_size)
            _draw_group(text, HEAD_MAPS[kind], rope, all_positions, keys[head], queries[at], generator)
    return IndexData(keys, queries[:, : len(positions)], positions, queries[:, len(positions) :], query_positions, rope)


def _draw_group(
    text: _Text,
    maps: _HeadMaps,
    rope: Rope,
    positions: Tensor,
    keys: Tensor,
    queries: Tensor,
    generator: torch.Generator,
) -> None:
    """Fill keys [n, d] and queries [group_size, len(positions), d] of one KV head."""
    n, head_dim = keys.shape
    width = text.keys.shape[1]
    axes = _orthogonal(width, generator) * torch.arange(1, width + 1) ** -maps.spectrum
    gain = torch.linspace(0.3, 1.3, head_dim // 2).repeat(2)  # fast pairs carry less than slow ones
    key_map = axes @ (_random_map(width, gain, generator) * maps.spread)
    key_bias = 0.5 * torch.randn(head_dim, generator=generator) + _slow_pairs(head_dim, maps.key_bias, generator)
    plain = text.keys[:n] @ key_map + key_bias
    keys.copy_(_at_positions(plain.unsqueeze(0), torch.arange(n), rope)[0])
    for row in queries:
        focus = _orthogonal(width, generator)[:, : maps.focus] * torch.linspace(1.5, 0.5, maps.focus).sqrt()
        unrelated = maps.unrelated * maps.spread * _random_map(width, gain, generator)
        query_map = focus @ focus.T @ (key_map + unrelated)
        bias = _slow_pairs(head_dim, maps.query_bias, generator) - maps.against * key_bias
        plain = (text.queries(positions, generator) @ query_map + bias) * maps.temperature
        row.copy_(_at_positions(plain.unsqueeze(0), positions, rope)[0])


def _hubby_text(n: int, generator: torch.Generator) -> _Text:
    length, width = n + DECODE_SPAN, 64
    meanings = torch.randn(VOCABULARY, width, generator=generator)
    tokens = _tokens(length, generator)
    topic = _slow(length, width, 0.999, generator)
    keys = meanings[tokens] + 1.2 * topic + 0.4 * torch.randn(length, width, generator=generator)

    def queries(positions: Tensor, generator: torch.Generator) -> Tensor:
        targets = tokens[_earlier(positions, generator)]
        noise = torch.randn(len(positions), width, generator=generator)
        return 2 * meanings[targets] + 0.5 * topic[positions] + 0.5 * noise

    return _Text(keys, queries)


def _diffuse_text(n: int, generator: torch.Generator) -> _Text:
    length, topic_width, width = n + DECODE_SPAN, 16, 40
    meanings = torch.randn(VOCABULARY, width, generator=generator)
    topics = torch.randn(-(-length // SEGMENT), topic_width, generator=generator)
    topic = topics.repeat_interleave(SEGMENT, 0)[:length]
    tokens = _tokens(length, generator)
    context = _slow(length, width, 0.9, generator)
    keys = torch.cat([topic, 0.7 * meanings[tokens] + 0.7 * context], 1)

    def queries(positions: Tensor, generator: torch.Generator) -> Tensor:
        about, near = _earlier(positions, generator), _earlier(positions, generator)
        like = 0.7 * meanings[tokens[near]] + 0.7 * context[about]
        noise = torch.randn(len(positions), topic_width + width, generator=generator)
        return torch.cat([topic[about], like], 1) + 0.7 * noise

    return _Text(keys, queries)


def _tokens(length: int, generator: torch.Generator) -> Tensor:
    """int64 [length]: Zipf's law, and copies of recent tokens."""
    weights = 1 / torch.arange(1.0, VOCABULARY + 1).double()
    drawn = torch.searchsorted(weights.cumsum(0) / weights.sum(), torch.rand(length, generator=generator).double())
    tokens = torch.arange(length)
    back = 1 + torch.randint(COPY_REACH, (length,), generator=generator)
    copied = (torch.rand(length, generator=generator) < COPIES) & (back <= tokens)
    source = torch.where(copied, tokens - back, tokens)
    while not torch.equal(further := source[source], source):  # a copy of a copy resolves to its drawn token
        source = further
    return drawn[source].clamp_(max=VOCABULARY - 1)


def _slow(length: int, width: int, memory: float, generator: torch.Generator) -> Tensor:
    """[length, width] of variance 1: x[i] = memory * x[i - 1] + noise, a block of rows at a time."""
    block = 256
    steps = torch.arange(block)
    ages = (steps[:, None] - steps[None, :]).double()
    weights = torch.where(ages >= 0, memory ** ages.clamp(min=0), 0.0).float()
    noise = torch.randn(length, width, generator=generator) * (1 - memory**2) ** 0.5
    last, rows = torch.randn(width, generator=generator), []
    for part in noise.split(block):
        count = len(part)
        rows.append(weights[:count, :count] @ part + memory ** (steps[:count, None] + 1.0) * last)
        last = rows[-1][-1]
    return torch.cat(rows)


def _earlier(positions: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random position up to each of ``positions``."""
    return (torch.rand(len(positions), generator=generator) * (positions + 1)).long().minimum(positions)


def _orthogonal(width: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, generator=generator)).Q


def _random_map(width: int, gain: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(width, len(gain), generator=generator) * gain * width**-0.5


def _slow_pairs(head_dim: int, size: float, generator: torch.Generator) -> Tensor:
    """[head_dim], zero but for 4 of the slowest quarter of the pairs, which are N(0, size^2)."""
    half = head_dim // 2
    pairs = half - 1 - torch.randperm(max(4, half // 4), generator=generator)[:4]
    bias = torch.zeros(head_dim)
    for part in (pairs, pairs + half):
        bias[part] = size * torch.randn(4, generator=generator)
    return bias


def _at_positions(plain: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    return rerotate(plain, torch.zeros_like(positions), positions, rope)
