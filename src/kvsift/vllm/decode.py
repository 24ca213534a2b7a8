"""Sparse attention of one generated token over vLLM's blocks, by the composed path of ``layer.sparse_attention``."""

from __future__ import annotations

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


def attend_token(
    shape: LayerShape, rule: Rule, query: Tensor, cache: BlockCache, blocks: Tensor, length: int, tally: Tally,
    sink_logit: Tensor | None = None, is_probed: bool = False,
) -> Tensor:  # fmt: skip
    """Return the attention of one token, the last of ``length`` cached ones, [num_query_heads, head_dim].

    Args:
        shape: the layer.
        rule: whose methods keep no memory besides page summaries (``settings.read_plan``).
        query: [num_query_heads, head_dim].
        cache: of the layer.
        blocks: int64 [num_blocks], physical blocks of the sequence, enough for ``length``.
        length: tokens.
        tally: in which the query is counted.
        sink_logit: [num_query_heads].
        is_probed: compare with exact attention.
    """
    segment = Segment(query[None, :, None], length - 1, length)
    reader = cache.reader(blocks[: -(-length // cache.block_size)], length, rule.method.summary_page_size)
    messages = LayerMessages()
    messages.begin(0, shape.layer)
    selector, view = Selector(shape, rule, "decode", None, 0, messages, tally), view_of(rule, segment)
    selection = selector.select_in(view)(segment, reader)
    part, visible = attend_sparse(shape, segment, reader, view, selection)
    part = part if selection is None else with_estimates(part, selection)
    part = part if sink_logit is None else with_sink_logit(part, sink_logit)
    tally.add_query(float(visible), length, cache.token_bytes)
    if is_probed:
        tally.add_probe(*probe(shape, query[:, None], reader.keys(), view.spans[0], selection))
    return part.output[0, :, 0]
