"""InfiniGen: tokens by logits that are foreseen one layer below, from a few channels (https://arxiv.org/abs/2406.19707).

Logits of layer i are estimated before layer i begins: x, the input of the attention below, times the query weights of
layer i (and RoPE) approximates its query. After rotation of queries and keys by an orthogonal A, a few channels
estimate the logits. A holds the right singular vectors of the queries of a calibration text (``kvsift calibrate``), and
a ``partial`` share of the rotated channels is kept: those with the largest sum of |q| + |k| over the prompt. A token
counts if its estimated logit is less than ``alpha`` below the largest. Each head selects as many tokens as count on
average over the heads, at most a fifth of the context.

The lowest sparse layer uses its own query if there is no layer below; layer 0 is dense by default, as in the paper.

Deviation from the paper:
- grouped queries, which the paper lacks: the query heads of a KV head share A, channels and, unless ``heads="query"``,
  a selection, of the tokens nearest to the largest logit of any of them;
- |q| + |k| is summed over every 32nd token, generated ones included, and channels are selected anew when the context
  has doubled; in between, keys along those channels are stored;
- sinks and window are always visible and part of the fifth; only tokens between them are compared with alpha;
- without a calibration file nothing is rotated;
- queries are estimated where they are used, not while the layer below runs, and no keys are prefetched: this reproduces
  the selection, not the overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.errors import InvalidValue
from kvsift.methods.checks import knob
from kvsift.methods.common import calibration
from kvsift.methods.common.token_rows import TokenRows
from kvsift.methods.loki import along
from kvsift.methods.oracle import exact_logits
from kvsift.methods.scoring import ScoringMethod, top_units
from kvsift.methods.traits import Traits
from kvsift.types import Candidates, KVReader, LayerShape, Limit, Selection

STRIDE, OFFSET = 32, 16  # every 32nd token is sampled, from the 16th on


@dataclass
class Channels:
    """Selected channels, and the keys along them, of one sequence in one layer.

    ``sizes`` holds |q| + |k| of the tokens 16, 48, 80 and so on, each float32 [num_kv_heads, head_dim].
    """

    basis: Tensor  # float32 [num_kv_heads, head_dim, head_dim], A
    sizes: list[Tensor] = field(default_factory=list)
    length: int = 0  # tokens that the axes were selected by
    axes: Tensor | None = None  # float32 [num_kv_heads, head_dim, count], columns of the basis
    rows: TokenRows = field(default_factory=TokenRows)

    def observe(self, queries: Tensor | None, keys: Tensor, start: int) -> None:
        """Receive new tokens, each once and in order."""
        basis = self.basis = self.basis.to(keys.device)
        sample = slice((OFFSET - start) % STRIDE, None, STRIDE)
        size = (keys[:, sample].float() @ basis).abs()  # [num_kv_heads, number of sampled tokens, head_dim]
        if queries is not None:
            size = size + along(queries[:, sample], basis).abs().unflatten(0, (len(basis), -1)).sum(1)
        self.sizes += size.unbind(1)

    def choose(self, start: int, count: int, device: torch.device) -> Tensor:
        """Return the axes for a query at ``start``; they change when the context has doubled."""
        length = 1 << (start.bit_length() - 1)
        if self.axes is None or length != self.length:
            sizes = self.sizes[: num_sampled(length)]
            size = torch.stack(sizes).double().sum(0).float() if sizes else self.basis.new_zeros(self.basis.shape[:2])
            largest = top_units(size, count)
            axes = self.basis.to(size.device).gather(2, largest.unsqueeze(1).expand(-1, self.basis.shape[1], -1))
            self.axes = axes.to(device)
            self.length, self.rows = length, TokenRows()
        return self.axes

    def fork(self) -> Channels:
        return Channels(self.basis, list(self.sizes), self.length, self.axes, self.rows.fork())

    def crop(self, length: int) -> None:
        del self.sizes[num_sampled(length) :]
        self.rows.crop(length)
        if length < self.length:
            self.length, self.axes = 0, None


@dataclass(frozen=True)
class InfiniGen(ScoringMethod):
    """Tokens whose estimated logit is near the largest; equally many for every head.

    Attributes:
        alpha: largest distance from the largest logit; 5 for Llama, 4 for OPT.
        partial: share of the channels that are compared; 0.1 in one launcher of the public code.
        calibration: file with the rotations of this model; none without it.
        compat: "code": every head is compared with the largest logit of head 0, as in the public accuracy code.
    """

    traits: ClassVar[Traits] = Traits(
        no_mass="selects as many tokens as alpha determines", wants_hidden=True, wants_queries=True, fills=False
    )
    source: ClassVar[str] = "arXiv 2406.19707"

    alpha: float = 5.0
    partial: float = knob(0.2, is_share=True)
    calibration: str | None = None
    compat: Literal["code"] | None = knob(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not self.alpha > 0:
            raise InvalidValue(f"alpha={self.alpha!r} must be a number greater than 0; 5 for Llama, 4 for OPT.")
        if self.calibration is not None:
            calibration.check("calibration", self.calibration)

    @property
    def budget_defaults(self) -> dict[str, Any]:
        return {"ratio": 0.2, "dense_layers": (0,)}

    def new_state(self, shape: LayerShape) -> Channels:
        if self.calibration is None:
            return Channels(torch.eye(shape.head_dim, dtype=torch.float32).expand(shape.num_kv_heads, -1, -1))
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
        query = queries if foreseen is None else foreseen.to(queries.device)
        axes = state.choose(start, self._count(shape), queries.device)
        rows = state.rows.read(reader, 0, start + 1, lambda keys: (keys.float() @ axes).to(keys.dtype))
        logits = exact_logits(shape, along(query, axes), rows)[:, 0]  # [num_query_heads, start + 1]
        below = logits - logits[: 1 if self.compat else None, :start].amax(-1, keepdim=True)
        below = below[:, candidates.tokens]
        near = int((below > -self.alpha).sum(-1).double().mean())
        if limit.units < candidates.count:
            limit = Limit(min(max(near, 1), limit.units))
        best = below.unflatten(0, (self.num_selections(shape), -1)).amax(1)
        return Selection(top_units(best, limit.units) + candidates.first, 1, full=True)

    def _count(self, shape: LayerShape) -> int:
        return max(ceil(self.partial * shape.head_dim), 1)


def num_sampled(length: int) -> int:
    """Return how many of the first ``length`` tokens are sampled."""
    return max(length - OFFSET + STRIDE - 1, 0) // STRIDE
