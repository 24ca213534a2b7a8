"""Attention of one query per head over a row read in place: all of it, or spans and listed units."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvsift import native
from kvsift.native.shapes import HeadRows, supports
from kvsift.native.twins import attend_dense as dense_attention_reference
from kvsift.native.twins import attend_units as unit_attention_reference
from kvsift.types import Part

__all__ = ["dense_attention", "reads_in_place", "unit_attention", "unit_attention_reference"]


def reads_in_place(queries: Tensor, keys: HeadRows) -> bool:
    """Whether the compiled core reads these without a copy; otherwise a copy of the selected rows is faster.

    queries [1, num_query_heads, num_queries, head_dim]; keys [num_kv_heads, num_tokens, head_dim].
    """
    return queries.shape[0] == queries.shape[2] == 1 and supports(queries[0, :, 0], keys)


def dense_attention(
    queries: Tensor, keys: HeadRows, values: HeadRows, scale: float, softcap: float | None = None
) -> Part:
    """Attention over all keys; arguments as of ``unit_attention``."""
    run = native.attend_dense if supports(queries[0, :, 0], keys) else dense_attention_reference
    output, lse = run(queries[0, :, 0], keys, values, scale, softcap)
    return Part(output[None, :, None], lse[None, :, None])


def unit_attention(
    queries: Tensor, keys: HeadRows, values: HeadRows, units: Tensor, unit_size: int,
    spans: Sequence[tuple[int, int]], scale: float, softcap: float | None = None,
) -> Part:  # fmt: skip
    """Attention over the tokens of spans and listed units.

    Args:
        queries: [1, num_query_heads, 1, head_dim].
        keys, values: [num_kv_heads, num_tokens, head_dim], of one sequence.
        units: int64 [num_heads, capacity], -1 pads; num_heads is 1, the KV heads or the query heads. Unit u is the
            tokens from u * unit_size on, as far as there are any.
        unit_size: tokens per unit.
        spans: (start, stop) of tokens that all heads attend; none of them is in a unit.
        scale, softcap: as in ``kernels.attention``.
    """
    run = native.attend_units if supports(queries[0, :, 0], keys) else unit_attention_reference
    output, lse = run(queries[0, :, 0], keys, values, units, unit_size, spans, scale, softcap)
    return Part(output[None, :, None], lse[None, :, None])
