"""InfiniGen: tokens by logits that are foreseen one layer below, from a few channels (https://arxiv.org/abs/2406.19707).

Attention of layer i is guessed before layer i begins: x, the input of the attention below, times this layer's query
weights (and RoPE) is nearly its query. Rotated by an orthogonal A, the same for keys, a few channels of it tell the
logits: A is made of the right singular vectors of the queries of a calibration text (``kvsift calibrate``), and of the
rotated channels those with the largest sum of |q| + |k| over the prompt are kept, a ``partial`` share. A token is
wanted whose guessed logit is less than ``alpha`` below the largest. How many are wanted, on average over the heads, is
how many each head gets, a fifth of the context at most.

The first sparse layer asks its own query if no layer lies below it; layer 0 is dense by default, as in the paper.

Deviation from the paper:
- grouped queries, which it does not have: the query heads of a KV head share A, channels and, unless ``heads="query"``,
  a selection, of the tokens that come nearest to the largest logit of any of them;
- |q| + |k| is summed over every 32nd token, generated ones included, and channels are chosen anew when the context has
  doubled, which the sums then cover; between, keys of those channels are remembered;
- sinks and window are always visible and part of the fifth; only tokens between them are counted against alpha;
- without a calibration file nothing is rotated;
- queries are foreseen where they are needed, not while the layer below runs, and nothing is fetched ahead: this is the
  choice, not the overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.methods import calibration, knobs
from kvsift.methods.base import ScoringMethod, top_units
from kvsift.methods.loki import along
from kvsift.methods.oracle import exact_logits
from kvsift.methods.token_rows import TokenRows
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

STRIDE, OFFSET = 32, 16  # every 32nd token is looked at, from the 16th on


@dataclass
class Channels:
    """Which rotated channels count, and the keys along them, of one sequence in one layer.

    ``seen`` holds |q| + |k| of the tokens 16, 48, 80 and so on, each float32 [num_kv_heads, head_dim].
    """

    basis: Tensor  # float32 [num_kv_heads, head_dim, head_dim], A
    seen: list[Tensor] = field(default_factory=list)
    length: int = 0  # tokens that the axes were chosen from
    axes: Tensor | None = None  # float32 [num_kv_heads, head_dim, count], columns of the basis
    rows: TokenRows = field(default_factory=TokenRows)

    def observe(self, queries: Tensor | None, keys: Tensor, start: int) -> None:
        """See tokens once and in order."""
        basis = self.basis = self.basis.to(keys.device)
        every = slice((OFFSET - start) % STRIDE, None, STRIDE)
        size = (keys[:, every].float() @ basis).abs()  # [num_kv_heads, number of sampled tokens, head_dim]
        if queries is not None:
            size = size + along(queries[:, every], basis).abs().unflatten(0, (len(basis), -1)).sum(1)
        self.seen += size.unbind(1)

    def choose(self, start: int, count: int, device: torch.device) -> Tensor:
        """The axes for a query at ``start``: they change when the context has doubled."""
        length = 1 << (start.bit_length() - 1)
        if self.axes is None or length != self.length:
            seen = self.seen[: sampled(length)]
            size = torch.stack(seen).double().sum(0).float() if seen else self.basis.new_zeros(self.basis.shape[:2])
            kept = top_units(size, count)
            axes = self.basis.to(size.device).gather(2, kept.unsqueeze(1).expand(-1, self.basis.shape[1], -1))
            self.axes = axes.to(device)
            self.length, self.rows = length, TokenRows()
        return self.axes

    def fork(self) -> Channels:
        return Channels(self.basis, list(self.seen), self.length, self.axes, self.rows.fork())

    def crop(self, length: int) -> None:
        del self.seen[sampled(length) :]
        self.rows.crop(length)
        if length < self.length:
            self.length, self.axes = 0, None


@dataclass(frozen=True)
class InfiniGen(ScoringMethod):
    """Tokens whose foreseen logit is near the largest; as many for every head.

    Attributes:
        alpha: how far below the largest logit a token may lie; 5 for Llama, 4 for OPT.
        partial: share of the channels that are compared; 0.1 in one launcher of the public code.
        calibration: file with the rotations of this model; none without it.
        compat: "code": every head counts from the largest logit of head 0, as the public accuracy code does.
    """

    estimates_mass: ClassVar[bool] = False
    no_mass: ClassVar[str] = "takes as many tokens as alpha says"
    wants_hidden: ClassVar[bool] = True
    wants_queries: ClassVar[bool] = True
    fills: ClassVar[bool] = False
    source: ClassVar[str] = "arXiv 2406.19707"

    alpha: float = 5.0
    partial: float = 0.2
    calibration: str | None = None
    compat: Literal["code"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise InputError(f"alpha={self.alpha!r} must be a number greater than 0; 5 for Llama, 4 for OPT.")
        knobs.share("partial", self.partial)
        if self.calibration is not None:
            calibration.check("calibration", self.calibration)
        if self.compat not in (None, "code"):
            raise InputError(f"compat={self.compat!r} must be 'code' or left out.")

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"ratio": 0.2, "dense_layers": (0,)}

    def new_state(self, shape: LayerShape) -> Channels:
        if self.calibration is None:
            return Channels(torch.eye(shape.head_dim).expand(shape.num_kv_heads, -1, -1))
        return Channels(calibration.directions(self.calibration, "queries", shape))

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return shape.num_kv_heads * (2 * self._count(shape) + 4 * shape.head_dim / STRIDE)

    def observe(
        self, state: Any, shape: LayerShape, queries: Tensor | None, keys: Tensor, values: Tensor, start: int
    ) -> None:
        state.observe(queries, keys, start)

    def select(
        self, state: Any, shape: LayerShape, queries: Tensor, start: int, candidates: Candidates, limit: Limit,
        reader: KVReader,
    ) -> Selection:  # fmt: skip
        foreseen = reader.from_below()
        asked = queries if foreseen is None else foreseen.to(queries.device)
        axes = state.choose(start, self._count(shape), queries.device)
        rows = state.rows.read(reader, 0, start + 1, lambda keys: (keys.float() @ axes).to(keys.dtype))
        logits = exact_logits(shape, along(asked, axes), rows)[:, 0]  # [num_query_heads, start + 1]
        below = logits - logits[: 1 if self.compat else None, :start].amax(-1, keepdim=True)
        below = below[:, candidates.tokens]
        wanted = int((below > -self.alpha).sum(-1).double().mean())
        if limit.units < candidates.count:
            limit = Limit(min(max(wanted, 1), limit.units))
        best = below.unflatten(0, (self.num_selections(shape), -1)).amax(1)
        return Selection(top_units(best, limit.units) + candidates.first, 1, full=True)

    def _count(self, shape: LayerShape) -> int:
        return max(ceil(self.partial * shape.head_dim), 1)


def sampled(length: int) -> int:
    """How many of the first ``length`` tokens are looked at."""
    return max(length - OFFSET + STRIDE - 1, 0) // STRIDE
