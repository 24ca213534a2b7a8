"""Attention where KV is in host memory: the host attends what was chosen, the device what is always visible."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import record_function

from kvsift.kernels.attention import attention
from kvsift.kernels.merge import merge
from kvsift.methods.base import Method
from kvsift.placement.host_reader import HostReader
from kvsift.placement.split import STREAMED_TOKENS, SplitStore
from kvsift.runtime.attend import Segment, attend_sparse
from kvsift.runtime.beside import beside
from kvsift.runtime.moved import attend_chosen, attend_sinks, seen_from_afar
from kvsift.types import LayerShape, Part, Selection

HOST_SPAN = "kvsift host attention"  # what a profiler calls it

Select = Callable[[Segment, HostReader], Selection | None]


def attend_dense_split(shape: LayerShape, segment: Segment, store: SplitStore, row: int) -> Part:
    """Every query over everything up to itself."""
    if store.attends_alone and segment.stop - segment.start == 1:
        return on_device(_attend_alone(shape, segment, store.row(row)), store)
    pieces = []
    for first in range(segment.start, segment.stop, STREAMED_TOKENS):  # so that a piece's own tokens are one block
        last = min(first + STREAMED_TOKENS, segment.stop)
        queries = segment.queries[:, :, first - segment.start : last - segment.start]
        ((own_keys, own_values),) = store.streamed(row, first, last)
        part = attention(queries, own_keys[None], own_values[None], shape.scale, causal=True, softcap=shape.softcap)
        for keys, values in store.streamed(row, 0, first):
            part = merge(part, attention(queries, keys[None], values[None], shape.scale, softcap=shape.softcap))
        pieces.append(part)
    store.forget_fresh()
    return Part(torch.cat([part.output for part in pieces], 2), torch.cat([part.lse for part in pieces], 2))


def _attend_alone(shape: LayerShape, segment: Segment, reader: HostReader) -> Part:
    """The one query over everything, on the host; packed values are unpacked a block at a time."""
    queries, size = segment.queries.cpu(), STREAMED_TOKENS if reader.packed else segment.stop
    part: Part | None = None
    for first in range(0, segment.stop, size):
        span = first, min(first + size, segment.stop)
        keys, values = (read(*span).unsqueeze(0) for read in (reader.keys, reader.values))
        block = attention(queries, keys, values, shape.scale, softcap=shape.softcap)
        part = block if part is None else merge(part, block)
    assert part is not None
    return part


def attend_sparse_split(
    shape: LayerShape, segment: Segment, store: SplitStore, row: int, spans: tuple[int, int], select: Select,
    whole_units: bool, moving: Method | None = None, at_once: bool | None = None,
) -> tuple[Part, Selection | None, int | float | Tensor]:  # fmt: skip
    """One query: the device attends sinks and window while the host chooses and attends what it chose.

    Args:
        select: what the method chooses, given queries and a reader on the host.
        whole_units: every token of a listed unit is there.
        moving: the method, if it sees sinks and selection from other positions.
        at_once: the device's part is launched by a thread of its own, so that the host need not be done with that
            before it begins; None: where the device is not the host.

    Returns:
        The part on the device, the selection, and how many tokens were visible.
    """
    here = segment._replace(queries=segment.queries.cpu())  # whatever the host does begins with them
    reader = store.row(row)

    def by_host() -> tuple[Part | None, int | float | Tensor, Selection | None]:
        with record_function(HOST_SPAN):
            selection = select(here, reader)
            if selection is None:
                return None, 0, None
            if moving is not None:
                far, moved = seen_from_afar(shape, moving, here, [spans])
                return *attend_chosen(shape, far, moved, reader, selection), selection
            nowhere = [(0, segment.stop)]  # no sinks, and a window that begins behind the query
            part, visible = attend_sparse(shape, here, reader, nowhere, selection, whole_units)
            return part, visible, selection

    def by_device() -> Part | None:
        return _near_part(shape, segment, store, row, spans, moving)

    if store.device.type != "cpu" if at_once is None else at_once:
        near = beside(by_device)
        try:
            chosen, visible, selection = by_host()
        finally:
            part = near.result()  # nothing is left running
    else:
        part = by_device()
        chosen, visible, selection = by_host()
    visible = visible + spans[0] + segment.stop - min(spans[1], segment.stop)
    parts = [each for each in (part, None if chosen is None else on_device(chosen, store)) if each is not None]
    return merge(*parts) if len(parts) > 1 else parts[0], selection, visible


def _near_part(
    shape: LayerShape, segment: Segment, store: SplitStore, row: int, spans: tuple[int, int], moving: Method | None
) -> Part | None:
    """Sinks and window on the device; None where there are none."""
    sinks, window = (0, spans[0]), (min(spans[1], segment.stop), segment.stop)
    if moving is not None and spans[0]:
        far, moved = seen_from_afar(shape, moving, segment, [spans])
        part, _ = attend_sinks(shape, far, moved, *store.near(row, *sinks), [spans])
        recent = _near_part(shape, segment, store, row, (0, spans[1]), None)
        return part if recent is None else merge(part, recent)
    near = [store.near(row, *span) for span in (sinks, window) if span[0] < span[1]]
    if not near:
        return None
    keys, values = (torch.cat(each, 1).unsqueeze(0) for each in zip(*near))
    return attention(segment.queries, keys, values, shape.scale, softcap=shape.softcap)


def on_device(part: Part, store: SplitStore) -> Part:
    """The part where the model runs."""
    return Part(part.output.to(store.device), part.lse.to(store.device))
