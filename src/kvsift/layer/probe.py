"""Recall and recovered attention mass of one decode step, by exact attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsift import native
from kvsift.layer.accounting import RECALL_TOP_K
from kvsift.native import twins
from kvsift.native.shapes import HeadRows, supports
from kvsift.types import LayerShape, Selection


def probe(
    shape: LayerShape, queries: Tensor, keys: HeadRows, spans: tuple[int, int], selection: Selection | None
) -> tuple[float, float]:
    """(recall, recovery), means over query heads.

    Recall is the share of the ``RECALL_TOP_K`` heaviest tokens that were visible; recovery the softmax mass on
    visible tokens. queries [num_query_heads, 1, head_dim]; keys [num_kv_heads, num_keys, head_dim]; spans are
    (sinks_stop, window_start).
    """
    weights = exact_shares(shape, queries, keys)
    visible = visible_tokens(shape, keys.shape[1], spans, selection, weights.device)
    return recall_and_recovery(weights, visible)


def recall_and_recovery(weights: Tensor, visible: Tensor) -> tuple[float, float]:
    """(recall, recovery) of visible tokens, bool [num_query_heads, num_keys], given exact shares of the same shape."""
    top = weights.topk(min(RECALL_TOP_K, weights.shape[1]), -1).indices
    recall = visible.gather(1, top).float().mean()
    recovery = (weights * visible).sum(-1).mean()
    return float(recall), float(recovery)


def exact_shares(shape: LayerShape, queries: Tensor, keys: HeadRows) -> Tensor:
    """Exact attention of one query per head to each key, float32 [num_query_heads, num_keys]; arguments as above."""
    return exact_scores(shape, queries, keys).softmax(-1)


def exact_scores(shape: LayerShape, queries: Tensor, keys: HeadRows) -> Tensor:
    """Logits of one query per head with each key, float32 [num_query_heads, num_keys]; arguments as above."""
    scores = native.all_scores if supports(queries[:, 0], keys) else twins.all_scores
    return shape.capped(scores(queries[:, 0], keys) * shape.scale)


def visible_tokens(
    shape: LayerShape, num_keys: int, spans: tuple[int, int], selection: Selection | None, device: torch.device
) -> Tensor:
    """Tokens in spans or selection, bool [num_query_heads, num_keys]."""
    visible = torch.zeros(shape.num_query_heads, num_keys, dtype=torch.bool, device=device)
    visible[:, : spans[0]] = True
    visible[:, spans[1] :] = True
    if selection is not None:
        chosen = selection.to_mask(num_keys)  # [num_heads, num_keys]
        visible |= chosen.repeat_interleave(shape.num_query_heads // chosen.shape[0], 0)
    return visible
