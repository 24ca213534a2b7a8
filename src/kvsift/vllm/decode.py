"""Sparse attention of one generated token over vLLM's blocks, by the composed path of ``layer.sparse_attention``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvsift.kernels.merge import with_sink_logit
from kvsift.layer.accounting import Tally
from kvsift.layer.layer_messages import LayerMessages
from kvsift.layer.probe import probe
from kvsift.layer.selection import Selector, view_of, with_estimates
from kvsift.plan.plan import Rule
from kvsift.stores.base import Segment
from kvsift.stores.parts import attend_sparse
from kvsift.types import LayerShape
from kvsift.vllm.block_cache import BlockCache


class AttendedToken(NamedTuple):
    """Attention of one token."""

    output: Tensor  # [num_query_heads, head_dim]
    visible: float  # tokens, per head
    index_bytes: float  # read to choose them
    recovery: float | None  # softmax mass on them, if it was asked for


def attend_token(
    shape: LayerShape, rule: Rule, query: Tensor, cache: BlockCache, blocks: Tensor, length: int,
    sink_logit: Tensor | None = None, is_probed: bool = False,
) -> AttendedToken:  # fmt: skip
    """Attend one token, the last of ``length`` cached ones.

    Args:
        shape: the layer.
        rule: whose methods keep no memory besides page summaries (``settings.read_plan``).
        query: [num_query_heads, head_dim].
        cache: of the layer.
        blocks: int64 [num_blocks], physical blocks of the sequence, enough for ``length``.
        length: tokens.
        sink_logit: [num_query_heads].
        is_probed: compare with exact attention.
    """
    segment, tally = Segment(query[None, :, None], length - 1, length), Tally()
    reader = cache.reader(blocks[: -(-length // cache.block_size)], length, rule.method.summary_page_size)
    messages = LayerMessages()
    messages.begin(0, shape.layer)
    selector, view = Selector(shape, rule, "decode", None, 0, messages, tally), view_of(rule, segment)
    selection = selector.select_in(view)(segment, reader)
    part, visible = attend_sparse(shape, segment, reader, view, selection)
    part = part if selection is None else with_estimates(part, selection)
    part = part if sink_logit is None else with_sink_logit(part, sink_logit)
    recovery = probe(shape, query[:, None], reader.keys(), view.spans[0], selection)[1] if is_probed else None
    return AttendedToken(part.output[0, :, 0], float(visible), tally.index_bytes_read, recovery)
