"""Exact merge of partial attentions over disjoint token sets."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift.types import Part


def merge(a: Part, b: Part) -> Part:
    """Attention over the union of two disjoint token sets.

    Args:
        a, b: output [batch, num_query_heads, num_queries, head_dim] in any dtype; lse [batch, num_query_heads,
            num_queries] float32, natural log, -inf for a row that saw nothing.

    Returns:
        The merged part, output in the dtype of ``a``. Merging with a part that saw nothing changes nothing.

    Raises:
        ValueError: if the two parts differ in shape.

    Source: RetrievalAttention (arXiv 2409.10516), equations 4 and 5.
    """
    if a.output.shape != b.output.shape or a.lse.shape != b.lse.shape:
        raise ValueError(f"parts differ in shape: {tuple(a.output.shape)} and {tuple(b.output.shape)}")
    lse = torch.logaddexp(a.lse, b.lse)
    output = a.output.float() * _share(a.lse, lse) + b.output.float() * _share(b.lse, lse)
    return Part(output.to(a.output.dtype), lse)


def _share(lse: Tensor, total: Tensor) -> Tensor:
    # exp(-inf - -inf) is NaN: a row that saw nothing anywhere has share 0 of nothing
    return torch.exp(lse - total.masked_fill(total == -torch.inf, 0.0)).unsqueeze(-1)


def with_sink_logit(part: Part, sink_logit: Tensor) -> Part:
    """Add a learned extra logit per head, [num_query_heads], whose value is zero (GPT-OSS)."""
    logit = sink_logit.float().view(1, -1, 1).expand_as(part.lse)
    return merge(part, Part(torch.zeros_like(part.output), logit))
