"""Attention where KV is in host memory and the device attends: what was chosen is brought to it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvsift.methods.base import Method
from kvsift.placement.offload import OffloadStore
from kvsift.runtime.attend import Segment, attend_sparse
from kvsift.runtime.moved import attend_moved
from kvsift.runtime.split import Select
from kvsift.types import LayerShape, Part, Selection


def attend_sparse_offload(
    shape: LayerShape, segment: Segment, store: OffloadStore, row: int, spans: tuple[int, int], select: Select,
    whole_units: bool, method: Method,
) -> tuple[Part, Selection | None, int | float | Tensor]:  # fmt: skip
    """One query on the device over sinks, window and what was chosen.

    A method that ranks summaries chooses on the device, where they are; one that reads keys chooses on the host, where
    they are: to bring all keys over for each token would cost more than to attend there.

    Returns:
        The part, the selection on the host, and how many tokens were visible.
    """
    if method.summaries:
        selection = select(segment, store.device_row(row))
    else:
        selection = select(segment._replace(queries=segment.queries.cpu()), store.row(row))
    for span in ((0, spans[0]), (min(spans[1], segment.stop), segment.stop)):
        if span[0] < span[1]:
            store.near(row, *span)
    here = None if selection is None else _moved(selection, store)
    reader = store.device_row(row)
    if method.moves:
        part, visible = attend_moved(shape, method, segment, reader, [spans], here)
    else:
        part, visible = attend_sparse(shape, segment, reader, [spans], here, whole_units)
    return part, None if selection is None else replace(selection, units=selection.units.cpu()), visible


def _moved(selection: Selection, store: OffloadStore) -> Selection:
    """The selection where the device attends it."""
    weight, extra, device = selection.log_weight, selection.extra, store.device
    return replace(
        selection,
        units=selection.units.to(device),
        log_weight=None if weight is None else weight.to(device),
        extra=None if extra is None else Part(extra.output.to(device), extra.lse.to(device)),
    )
