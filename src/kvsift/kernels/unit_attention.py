"""Attention over a row read in place: of a few tokens over all of it, or of one token over spans and listed units."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvsift import native
from kvsift.native.attention import SHARE_TOKENS
from kvsift.native.shapes import HeadRows, supports
from kvsift.native.twins import attend_dense as dense_attention_reference
from kvsift.native.twins import attend_units as unit_attention_reference
from kvsift.types import Part

__all__ = ["SHARE_TOKENS", "dense_attention", "reads_in_place", "unit_attention", "unit_attention_reference"]


def reads_in_place(queries: Tensor, keys: HeadRows, most_queries: int = 1) -> bool:
    """Whether the compiled core reads these without a copy; otherwise a copy of the selected rows is faster.

    queries [1, num_query_heads, num_queries, head_dim]; keys [num_kv_heads, num_tokens, head_dim].
    """
    few = queries.shape[0] == 1 and 0 < queries.shape[2] <= most_queries
    return few and supports(queries[0, :, 0], keys)


def dense_attention(
    queries: Tensor, keys: HeadRows, values: HeadRows, scale: float, softcap: float | None = None,
    shares: Tensor | None = None,
) -> Part:  # fmt: skip
    """Attention of consecutive tokens, the last of which sees all keys; queries [1, num_query_heads, num_tokens,
    head_dim], the others as of ``unit_attention``. Each token gets the bits that it gets alone. ``shares`` as of
    ``native.attend_dense``."""
    run = native.attend_dense if supports(queries[0, :, 0], keys) else dense_attention_reference
    output, lse = run(queries[0], keys, values, scale, softcap, shares=shares)
    return Part(output[None], lse[None])


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
