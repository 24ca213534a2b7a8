"""Attention where KV is in host memory: the host attends what was chosen, the device what is always visible."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import record_function

from kvsift.kernels.attention import attention
from kvsift.kernels.merge import merge
from kvsift.placement.split import STREAMED_TOKENS, SplitStore
from kvsift.runtime.attend import Segment, attend_sparse
from kvsift.types import LayerShape, Part, Selection

HOST_QUERIES = 1  # that the host attends itself to everything; more are worth bringing its keys to the device


def attend_dense_split(shape: LayerShape, segment: Segment, store: SplitStore, row: int) -> Part:
    """Every query over everything up to itself."""
    num_queries = segment.stop - segment.start
    if num_queries <= HOST_QUERIES:
        reader = store.row(row)
        keys, values = (read(0, segment.stop).unsqueeze(0) for read in (reader.keys, reader.values))
        return on_device(attention(segment.queries.cpu(), keys, values, shape.scale, softcap=shape.softcap), store)
    pieces = []
    for first in range(segment.start, segment.stop, STREAMED_TOKENS):  # so that a piece's own tokens are one block
        last = min(first + STREAMED_TOKENS, segment.stop)
        queries = segment.queries[:, :, first - segment.start : last - segment.start]
        ((own_keys, own_values),) = store.streamed(row, first, last)
        part = attention(queries, own_keys[None], own_values[None], shape.scale, causal=True, softcap=shape.softcap)
        for keys, values in store.streamed(row, 0, first):
            part = merge(part, attention(queries, keys[None], values[None], shape.scale, softcap=shape.softcap))
        pieces.append(part)
    return Part(torch.cat([part.output for part in pieces], 2), torch.cat([part.lse for part in pieces], 2))


def attend_sparse_split(
    shape: LayerShape, segment: Segment, store: SplitStore, row: int, spans: tuple[int, int],
    select: Callable[[Segment], Selection | None], whole_units: bool,
) -> tuple[Part, Selection | None, int | float | Tensor]:  # fmt: skip
    """One query: the device attends sinks and window while the host chooses and attends what it chose.

    Returns:
        The part on the device, the selection, and how many tokens were visible.
    """
    wait_for_queries = _on_the_way(segment.queries)  # before the device has anything else to do
    sinks_stop, window_start = spans[0], min(spans[1], segment.stop)
    near = [store.near(row, *span) for span in ((0, sinks_stop), (window_start, segment.stop)) if span[0] < span[1]]
    part = None
    if near:
        keys, values = (torch.cat(each, 1).unsqueeze(0) for each in zip(*near))
        part = attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap)
    at_host = Segment(wait_for_queries(), segment.start, segment.stop)
    always = sinks_stop + segment.stop - window_start
    with record_function("kvsift host attention"):
        selection = select(at_host)
        if selection is None:
            assert part is not None
            return part, None, always
        nowhere = [(0, segment.stop)]  # no sinks, and a window that begins behind the query
        chosen, visible = attend_sparse(shape, at_host, store.row(row), nowhere, selection, whole_units)
    chosen = on_device(chosen, store)
    return chosen if part is None else merge(part, chosen), selection, always + visible


def _on_the_way(queries: Tensor) -> Callable[[], Tensor]:
    """Start to copy queries to the host; what is returned waits for them alone, not for what the device does next."""
    if not queries.is_cuda:
        return lambda: queries
    there = torch.empty(queries.shape, dtype=queries.dtype, pin_memory=True)
    there.copy_(queries.contiguous(), non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(queries.device))

    def wait() -> Tensor:
        arrived.synchronize()
        return there

    return wait


def on_device(part: Part, store: SplitStore) -> Part:
    """The part where the model runs."""
    return Part(part.output.to(store.device), part.lse.to(store.device))
