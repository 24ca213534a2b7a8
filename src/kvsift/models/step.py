"""A decode step of a whole model, as the engine captures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kvsift.layer.paged_decode import DecodeBatch, DecodeLayer, StepMode


class Step(Protocol):
    """One token per sequence, without the host."""

    @property
    def keeps_bits(self) -> bool:
        """Whether what a row of blocks gets does not depend, in any bit, on how many rows there are."""

    def angles(self, num_positions: int) -> Tensor:
        """Return the rotary angles of all positions, to be passed to every step; empty if the model computes them."""

    def __call__(
        self, tokens: Tensor, angles: Tensor, batch: DecodeBatch, attention: Sequence[DecodeLayer],
        summaries: Sequence[Mapping[str, Tensor]], mode: StepMode, watched: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits after one more token per sequence; store its keys and values.

        Args:
            tokens: int64 [batch].
            angles: see ``angles``.
            batch: already advanced, so that its lengths count the tokens.
            attention: of every layer.
            summaries: kind -> pool that is written, of every layer.
            mode: of attention.
            watched: receives the queries of every layer, [batch, num_query_heads, head_dim].

        Returns:
            float32 [batch, vocabulary].
        """
