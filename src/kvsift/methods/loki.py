"""Loki: tokens by logits in the directions in which keys differ most (https://arxiv.org/abs/2406.02542).

The principal axes of each layer and KV head come from a calibration text (``kvsift calibrate``), from its keys after or
before RoPE; in both cases they are applied after RoPE. The components of each key along the first ``rank`` axes are
stored, and a query is compared with those.

Deviation from the paper:
- keys are not stored rotated, so the components take additional memory; attention over the selection is the same;
- without a file the axes come from the sequence itself: from its first 2^n keys, as many as there are before the
  queries. They depend on the position alone, and are computed again whenever the context doubles. Whole keys are read
  then: this reproduces the selection, not the speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvsift.errors import UnusedOption
from kvsift.methods.base import Phase, seen_by_all
from kvsift.methods.checks import knob
from kvsift.methods.common import calibration
from kvsift.methods.common.softmax_share import ShareMethod, mean_shares
from kvsift.methods.common.token_rows import TokenRows
from kvsift.types import KVReader, LayerShape


@dataclass
class Axes:
    """Principal axes of the first keys of one sequence in one layer."""

    length: int = 0  # tokens that they were computed from
    axes: Tensor | None = None  # float32 [num_kv_heads, head_dim, rank]

    def fork(self) -> Axes:
        return Axes(self.length, self.axes)  # shared: never written to

    def crop(self, length: int) -> None:
        if length < self.length:
            self.length, self.axes = 0, None


@dataclass
class CalibratedAxes:
    """Axes from a file, and the components of the keys of one sequence in one layer."""

    axes: Tensor  # float32 [num_kv_heads, head_dim, rank]
    rows: TokenRows

    def fork(self) -> CalibratedAxes:
        return CalibratedAxes(self.axes, self.rows.fork())

    def crop(self, length: int) -> None:
        self.rows.crop(length)


@dataclass(frozen=True)
class Loki(ShareMethod):
    """Tokens by their share of attention along a few principal axes of the keys.

    Attributes:
        rank: axes kept.
        calibration: file with the axes of this model; without it they are computed from the sequence.
        axes: axes of the keys "after_rope" or "before_rope"; with a file alone.
    """

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")
    source: ClassVar[str] = "arXiv 2406.02542"

    rank: int = knob(32, 1)
    calibration: str | None = None
    axes: Literal["after_rope", "before_rope"] = knob("after_rope")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibration is not None:
            calibration.check("calibration", self.calibration)
        elif self.axes != "after_rope":
            raise UnusedOption(f"axes={self.axes!r} are those of a file; add calibration=FILE, or leave axes out.")

    def new_state(self, shape: LayerShape) -> Axes | CalibratedAxes:
        if self.calibration is None:
            return Axes()
        return CalibratedAxes(
            calibration.directions(self.calibration, f"keys_{self.axes}", shape)[..., : self.rank], TokenRows()
        )

    def state_bytes_per_token(self, shape: LayerShape) -> float:
        return 0 if self.calibration is None else 2 * shape.num_kv_heads * min(self.rank, shape.head_dim)

    def shares(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        if self.calibration is None:
            return super().shares(state, shape, queries, start, reader)
        axes = state.axes = state.axes.to(queries.device)
        stop = seen_by_all(start, queries.shape[1])
        rows = state.rows.read(reader, 0, stop, lambda keys: (keys.float() @ axes).to(keys.dtype))
        return mean_shares(shape, along(queries, axes), rows)

    def stand_ins(self, state: Any, shape: LayerShape, queries: Tensor, start: int, reader: KVReader) -> Tensor:
        length = 1 << (start.bit_length() - 1)
        if state.length != length:
            state.length, state.axes = length, principal_axes(reader.keys(0, length), self.rank)
        return along(along(queries, state.axes), state.axes.mT)  # q.k along the axes alone


def along(queries: Tensor, axes: Tensor) -> Tensor:
    """Multiply queries [num_query_heads, n, d] by axes of the KV head [num_kv_heads, d, r]; float32 [.., n, r]."""
    grouped = queries.float().unflatten(0, (len(axes), -1)).flatten(1, 2)
    return (grouped @ axes).reshape(*queries.shape[:2], axes.shape[-1])


def principal_axes(keys: Tensor, rank: int) -> Tensor:
    """Directions of largest variance, [num_kv_heads, num_keys, head_dim] -> float32 [num_kv_heads, head_dim, rank]."""
    centred = keys.float() - keys.float().mean(1, keepdim=True)
    return torch.linalg.eigh(centred.mT @ centred).eigenvectors[..., -rank:]  # eigenvalues come ascending
