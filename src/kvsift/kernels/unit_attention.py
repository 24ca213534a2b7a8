"""Attention of one query per head over spans and listed units of a sequence, read where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvsift import native
from kvsift.native.takes import takes
from kvsift.native.twins import attend_units as unit_attention_reference
from kvsift.types import Part

__all__ = ["reads_in_place", "unit_attention", "unit_attention_reference"]


def reads_in_place(queries: Tensor, keys: Tensor) -> bool:
    """Whether the compiled core takes these, so that nothing need be copied; else gathering first is faster.

    queries [1, num_query_heads, num_queries, head_dim]; keys [num_kv_heads, num_tokens, head_dim].
    """
    return queries.shape[0] == queries.shape[2] == 1 and takes(queries[0, :, 0], keys)


def unit_attention(
    queries: Tensor, keys: Tensor, values: Tensor, units: Tensor, unit_size: int, spans: Sequence[tuple[int, int]],
    scale: float, softcap: float | None = None,
) -> Part:  # fmt: skip
    """Attention over what is in a span or a listed unit.

    Args:
        queries: [1, num_query_heads, 1, head_dim].
        keys, values: [num_kv_heads, num_tokens, head_dim], of one sequence.
        units: int64 [num_heads, capacity], -1 pads; num_heads is 1, the KV heads or the query heads. Unit u is the
            tokens from u * unit_size on, as far as there are any.
        unit_size: tokens per unit.
        spans: (start, stop) of tokens that all heads see; none of them is in a unit.
        scale, softcap: as in ``kernels.attention``.
    """
    run = native.attend_units if takes(queries[0, :, 0], keys) else unit_attention_reference
    output, lse = run(queries[0, :, 0], keys, values, units, unit_size, spans, scale, softcap)
    return Part(output[None, :, None], lse[None, :, None])
