"""A decode step of a whole model, as the engine captures it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from kvsift.layer.paged_decode import DecodeBatch, DecodeLayer, StepMode
from kvsift.models.hf.slot_states import SlotStates
from kvsift.types import Objections

NO_STEP: Objections = (  # to models, whatever their architecture: for where or what their weights are
    (lambda model: (count := len({parameter.device for parameter in model.parameters()})) > 1 and count,
     "{it.__class__.__name__} is spread over {found} devices"),
    (lambda model: getattr(model, "_tp_size", None), "{it.__class__.__name__} is split by tensor parallelism"),
    (lambda model: any(type(each).__name__ == "Linear8bitLt" and each.state.threshold for each in model.modules()),
     "its int8 layers look for outliers on the host (llm_int8_threshold > 0)"),
)  # fmt: skip


class Step(Protocol):
    """One token per sequence, without the host."""

    @property
    def keeps_bits(self) -> bool:
        """Whether what a row of blocks gets does not depend, in any bit, on how many rows there are."""

    @property
    def writes_states(self) -> bool:
        """Whether steps leave the states of linear layers before them alone (``SlotStates.rings``)."""

    def angles(self, num_positions: int) -> Tensor:
        """Return the rotary angles of lengths up to this one, to be passed to every step; empty if the model computes
        them."""

    def __call__(
        self, tokens: Tensor, angles: Tensor, batch: DecodeBatch, attention: Sequence[DecodeLayer],
        summaries: Sequence[Mapping[str, Tensor]], states: SlotStates, mode: StepMode,
        watched: list[Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits after one more token per sequence, in any dtype; store its keys and values.

        Args:
            tokens: int64 [batch].
            angles: see ``angles``.
            batch: already advanced, so that its lengths count the tokens.
            attention: attention of every layer with pages.
            summaries: kind -> pool that is written, of every layer with pages.
            states: what the other layers keep.
            mode: mode of attention.
            watched: receives the queries of every layer with pages, [batch, num_query_heads, head_dim].

        Returns:
            [batch, vocabulary].
        """
