"""Attention over what a store holds, where and as it holds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kvsift.methods.base import Method
from kvsift.placement.device import DeviceStore, RowReader
from kvsift.placement.evicting import EvictingStore
from kvsift.placement.offload import OffloadStore
from kvsift.placement.split import SplitStore
from kvsift.runtime.attend import Segment, attend_dense, attend_sparse
from kvsift.runtime.evicting import attend_kept, drop_hidden
from kvsift.runtime.moved import attend_moved
from kvsift.runtime.offload import attend_sparse_offload
from kvsift.runtime.split import attend_dense_split, attend_sparse_split
from kvsift.types import LayerShape, Part, Selection

Select = Callable[[Segment, RowReader], Selection | None]


def attend_everything(shape: LayerShape, segment: Segment, store: DeviceStore, row: int) -> Part:
    """Every query over everything up to itself."""
    if isinstance(store, SplitStore):
        return attend_dense_split(shape, segment, store, row)
    return attend_dense(shape, segment, store.row(row))


def attend_visible(
    shape: LayerShape, segment: Segment, store: DeviceStore, row: int, spans: Sequence[tuple[int, int]],
    select: Select, whole_units: bool, method: Method, drops: bool,
) -> tuple[Part, Selection | None, int | float | Tensor]:  # fmt: skip
    """Always-visible spans and what ``select`` chooses, what that is, and how many tokens, summed over queries. With
    ``drops`` an evicting store forgets the rest."""
    if isinstance(store, OffloadStore):
        return attend_sparse_offload(shape, segment, store, row, spans[0], select, whole_units, method)
    if isinstance(store, SplitStore):
        moving = method if method.moves else None
        return attend_sparse_split(shape, segment, store, row, spans[0], select, whole_units, moving)
    reader = store.row(row)
    chosen = select(segment, reader)
    dropping = store if drops and isinstance(store, EvictingStore) else None
    if dropping is not None:
        reader = drop_hidden(dropping, row, segment, spans[0], chosen)
    if method.moves:
        part, visible = attend_moved(shape, method, segment, reader, spans, chosen)
    elif dropping is not None:
        part, visible = attend_kept(shape, segment, reader, spans)
    else:
        part, visible = attend_sparse(shape, segment, reader, spans, chosen, whole_units)
    return part, chosen, visible
