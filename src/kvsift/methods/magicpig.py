"""MagicPIG: a weighted sample of the tokens, drawn by hash tables (https://arxiv.org/abs/2410.16179).

Keys are centred and hashed by the signs of random projections: K signs are the code in one table, and there are L
tables. A key is sampled if its code is the query's in two tables or more. With theta the angle between the query and
the centred key that happens with probability

    u = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1),    p = 1 - theta / pi,

and a sampled key has the weight 1 / u: -log(u + 1e-4) is added to its logit.

Deviation from the paper:
- the number of samples is unbounded in the paper. Here a budget is met exactly: tables are used one after the other as
  long as their samples fit, and keys drawn evenly from the rest fill the budget. With u of the tables in use and r the
  sampled share of the rest, the probability is u + (1 - u) r. The number of tables depends on the samples, and weights
  assume a fixed number, so they are approximate;
- there are no tables from codes to keys: the codes of all keys are compared, at 2 L bytes per key and KV head, more
  than the key itself. This reproduces the estimate, not the speed;
- the centre is the mean of the first ``settled`` candidates, not of the prompt: keys are hashed once, and again when
  the context has grown by a seventh or more.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvsift.methods.base import Method
from kvsift.methods.checks import knob
from kvsift.methods.common.token_rows import SettledRows
from kvsift.methods.scoring import top_units
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

EPSILON = 1e-4  # its inverse bounds the weights


class Signatures(SettledRows):
    """Codes of the keys of one sequence in one layer, int16 [num_kv_heads, count, tables].

    Args:
        planes: float32 [head_dim, tables * bits], normals of the hyperplanes.
        tables: codes per key.
    """

    def __init__(self, planes: Tensor, tables: int) -> None:
        super().__init__()
        self._planes, self._tables = planes, tables
        self.centre = torch.empty(0)  # float64 [num_kv_heads, 1, head_dim]

    def settle(self, keys: Tensor) -> None:
        self.centre = keys.double().mean(1, keepdim=True)

    def rows_of(self, keys: Tensor) -> Tensor:
        return self.hash(keys - self.centre)

    def hash(self, vectors: Tensor) -> Tensor:
        """Codes of vectors [.., n, head_dim], int16 [.., n, tables]."""
        self._planes = self._planes.to(vectors.device)
        # float64, so that no sign depends on how many vectors come at once
        signs = (vectors.double() @ self._planes.double() > 0).unflatten(-1, (self._tables, -1))
        return (signs * (1 << torch.arange(signs.shape[-1], device=signs.device))).sum(-1).to(torch.int16)


@dataclass(frozen=True)
class MagicPIG(Method):
    """A weighted sample of the tokens, for each query head.

    Attributes:
        bits: signs per code (K of the paper).
        tables: codes per key (L of the paper).
        seed: seed of the projections and the draw.
    """

    source: ClassVar[str] = "arXiv 2410.16179"
    traits: ClassVar[Traits] = Traits(no_mass="estimates the shares of its sample alone")

    bits: int = knob(10, 1, 15)
    tables: int = knob(150, 2)
    seed: int = knob(0, 0)

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"dense_layers": (0, 16, 32, 48, 64)}

    def new_state(self, shape: LayerShape) -> Signatures:
        planes = torch.randn(
            shape.head_dim, self.tables * self.bits, generator=_generator(self.seed, shape.layer), dtype=torch.float32
        )
        return Signatures(planes, self.tables)

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return 2 * self.tables * shape.num_kv_heads

    def prepare(self, state: Any, shape: LayerShape, candidates: Candidates, reader: KVReader, limit: Limit) -> None:
        if candidates.count > 0:
            state.read(reader, candidates)

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        if limit.units >= candidates.count:
            every = torch.arange(candidates.first, candidates.stop, device=queries.device)
            return Selection(every.unsqueeze(0), 1, full=True)
        codes = state.read(reader, candidates)
        signatures = state.hash(queries[:, 0])  # [num_query_heads, tables]
        draw = self._draw(shape, start, candidates).to(queries.device)
        keys = reader.borrow(candidates.first, candidates.stop)
        rows, weights = [], []
        for head, query in enumerate(queries[:, 0]):
            kv_head = head // shape.group_size
            sampled, tables = within_budget(codes[kv_head] == signatures[head], limit.units)
            chosen = top_units((draw[head] + sampled.double()).unsqueeze(0), limit.units)[0]
            angle = angles(query, keys[kv_head, chosen] - state.centre[kv_head])
            room, rest = limit.units - int(sampled.sum()), candidates.count - int(sampled.sum())
            u = inclusion(angle, self.bits, tables)
            rows.append(chosen + candidates.first)
            weights.append(-(u + (1 - u) * room / rest + EPSILON).log())
        reader.count_bytes(len(rows) * limit.units * shape.head_dim * keys.element_size())
        return Selection(torch.stack(rows), 1, log_weight=torch.stack(weights).float(), full=True)

    def _draw(self, shape: LayerShape, start: int, candidates: Candidates) -> Tensor:
        """Uniform numbers, [num_query_heads, count], that depend on seed, layer and positions alone."""
        generator = _generator(self.seed, shape.layer, start)
        draw = torch.rand(shape.num_query_heads, candidates.stop, generator=generator, dtype=torch.float64)
        return draw[:, candidates.units]


def within_budget(same: Tensor, most: int) -> tuple[Tensor, int]:
    """Sample the keys that collide in two of the first tables, with as many tables as give at most ``most`` keys.

    same bool [count, tables]: whether the codes of key and query are equal -> bool [count], and the number of tables.
    """
    often = (same.sum(-1) >= 2).nonzero().squeeze(-1)
    needed = (same[often].cumsum(-1) >= 2).byte().argmax(-1) + 1  # tables until a key is sampled
    tables = same.shape[1] if len(often) <= most else int(needed.sort().values[most]) - 1
    sampled = same.new_zeros(same.shape[0])
    sampled[often[needed <= tables]] = True
    return sampled, tables


def angles(query: Tensor, keys: Tensor) -> Tensor:
    """Angles between a query [head_dim] and keys [n, head_dim], float64 [n], from 0 to pi."""
    cosine = torch.nn.functional.cosine_similarity(query.double().unsqueeze(0), keys.double(), dim=-1)
    return cosine.clamp(-1, 1).acos()


def inclusion(angle: Tensor, bits: int, tables: int) -> Tensor:
    """Probability that a key at an angle to the query collides with it in two tables or more."""
    once = (1 - angle / pi) ** bits
    return 1 - (1 - once) ** tables - tables * once * (1 - once) ** (tables - 1)


def _generator(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seeds) & 0x7FFFFFFF)
