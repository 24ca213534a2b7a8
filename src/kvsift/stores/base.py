"""The contract of a store: where keys and values of one layer are, and attention over them.

A placement is a store class with its knobs, listed in ``stores.catalogue``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvsift.stores.page_table import PageTable
from kvsift.stores.reader import RowReader
from kvsift.types import LayerShape, Moved, Objections, Part, Selection


def seen_densely(start: int, stop: int) -> int:
    """Tokens that dense attention shows to the queries at these positions, summed over them."""
    return (stop - start) * (start + stop + 1) // 2


class Segment(NamedTuple):
    """Consecutive new queries of one sequence, and their positions."""

    queries: Tensor  # [1, num_query_heads, num_queries, head_dim]
    start: int  # position of the first query
    stop: int

    @property
    def num_queries(self) -> int:
        return self.stop - self.start

    @property
    def context_tokens(self) -> int:
        """Tokens that dense attention shows, summed over the queries."""
        return seen_densely(self.start, self.stop)


class View(NamedTuple):
    """What the queries of a segment may see besides a selection, and how.

    Attributes:
        spans: (sinks_stop, window_start) of the first query, if later ones see all that it sees, or of every query, if
            their windows slide within the segment.
        whole_units: every token of a selected unit is stored.
        from_summaries: the selection is made from page summaries, not from keys.
        reposition: positions from which sinks and selection are seen (``Method.reposition``), if not their own.
        evict: forget what is not visible to the first query.
    """

    spans: Sequence[tuple[int, int]]
    whole_units: bool = True
    from_summaries: bool = False
    reposition: Callable[[Tensor, Sequence[tuple[int, int]]], Moved] | None = None
    evict: bool = False


Select = Callable[[Segment, RowReader], Selection | None]


class Attended(NamedTuple):
    """Attention of a segment, the selection it went by, and visible tokens per head, summed over queries."""

    part: Part
    selection: Selection | None
    visible: int | float | Tensor


class Pools(NamedTuple):
    """Tensors that captured steps read and write."""

    keys: Tensor  # [num_kv_heads, num_pages, page_size, head_dim]
    values: Tensor
    summaries: dict[str, Tensor]  # kind -> [num_kv_heads, num_pages, width], of the kinds that are maintained


class Transfers(NamedTuple):
    """Traffic from host memory to the device."""

    num_bytes: int = 0  # of keys and values
    pieces_requested: int = 0  # pages or tokens of a head that were selected
    pieces_cached: int = 0  # of them, those that were on the device already


class Store(ABC):
    """Keys, values and page summaries of one layer for the sequences of a batch; ``row`` is the number of a sequence.

    Attributes:
        shape: the layer.
        page_size: tokens per page.
        lengths: tokens cached per sequence, evicted ones included.
        token_bytes: bytes of keys and values of one token.
        table: pages of the sequences; None where every sequence has pages of its own.
        kinds: kinds of page summaries that are maintained and can be read.
        rounds: keys are read otherwise than they were appended.
    """

    in_host_memory: ClassVar[bool] = False  # whatever the device of the model
    captures: ClassVar[bool] = True  # it has ``pools`` for captured steps
    not_captured: ClassVar[Objections] = ()  # to captured steps over the pools (``plan.capabilities``)
    objections: ClassVar[Objections] = (  # to plans under the placement
        (lambda case: case.on_gpu and case.plan.decode is not None and case.plan.decode.method.traits.on_host,
         "decode={it.plan.decode} searches host memory, and with placement={it.place.name} keys and values are on the "
         "GPU. Take placement=split, or device=cpu."),
    )  # fmt: skip
    evicts: ClassVar[bool] = False  # it can evict tokens for good

    shape: LayerShape
    page_size: int
    lengths: list[int]
    token_bytes: int
    table: PageTable | None = None
    kinds: tuple[str, ...] = ()
    rounds: bool = False

    @classmethod  # noqa: B027 (no knobs by default)
    def check_knobs(cls, **knobs: Any) -> None:
        """Refuse knobs of the placement that make no sense (``InputError``)."""

    @classmethod
    def bytes_per_token(cls, head_dim: int, dtype: torch.dtype, **knobs: Any) -> int:
        """Bytes of the keys and values of one token and KV head."""
        return 2 * head_dim * dtype.itemsize

    @classmethod
    def device_tokens(cls, num_tokens: int, summary_share: float, **knobs: Any) -> int:
        """Tokens whose KV takes as much as the store holds on the device for a context of ``num_tokens``, besides the
        chunk that is being read; summaries take ``summary_share`` of the KV."""
        return num_tokens

    @property
    def is_remote(self) -> bool:
        """Whether KV is in the memory of a host that is not the device of the model."""
        return False

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes allocated for keys, values and summaries."""

    @property
    def num_device_bytes(self) -> int:
        """The part of ``num_bytes`` on the device of the model."""
        return self.num_bytes

    @abstractmethod
    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Store new tokens of a sequence, [num_kv_heads, num_new, head_dim], and summarise the pages they touch."""

    def restore(self, row: int, keys: Tensor, values: Tensor, summaries: Mapping[str, Tensor]) -> None:
        """As ``append`` to an empty sequence, of ``RowReader.rows`` of a store like this one, with summaries of its
        pages, [num_kv_heads, num_pages, width], which need not be computed again."""
        self.append(row, keys, values)

    @abstractmethod
    def reader(self, row: int) -> RowReader:
        """What a sequence holds, in logical order."""

    @abstractmethod
    def attend_all(self, row: int, segment: Segment) -> Part:
        """Dense attention: every query over everything up to itself."""

    @abstractmethod
    def attend(self, row: int, segment: Segment, view: View, select: Select) -> Attended:
        """Sparse attention over what the view shows and what ``select`` chooses, given queries and a reader."""

    @abstractmethod
    def fork(self, sources: Sequence[int]) -> None:
        """Sequence i becomes a copy of sequence ``sources[i]``."""

    @abstractmethod
    def crop(self, row: int, length: int) -> None:
        """Forget the tokens of a sequence from position ``length`` on."""

    @abstractmethod
    def repage(self, page_size: int, summaries: Iterable[str]) -> None:
        """Maintain these summaries and no others from now on, over pages of this size."""

    def pools(self) -> Pools:
        """Tensors for captured steps, of a store that ``captures``."""
        raise NotImplementedError(f"steps over a {type(self).__name__} are not captured")

    def reserve_rows(self, lengths: Sequence[int]) -> None:
        """Reserve pages for sequences of these lengths, and a scratch page: up to them, no pool moves. As ``pools``."""
        raise NotImplementedError(f"steps over a {type(self).__name__} are not captured")

    def advance(self, row: int, length: int, stale_from: int | None = None) -> None:
        """Record that captured steps have written a sequence up to ``length``, without summaries of the tokens from
        position ``stale_from`` on, which are computed now. As ``pools``."""
        raise NotImplementedError(f"steps over a {type(self).__name__} are not captured")

    def num_stored(self, row: int) -> int:
        """Tokens of a sequence that are still stored."""
        return self.lengths[row]

    def summarise_open_page(self, row: int) -> None:  # noqa: B027 (nothing to do where no page is summarised)
        """Summarise the page being filled, which otherwise waits until its summary is read."""

    def checkpoint(self) -> None:  # noqa: B027 (nothing to do where nothing is evicted)
        """Remember the present lengths: sequences may be rolled back to them."""

    def can_crop(self, row: int, length: int) -> bool:
        """Whether every token that ``crop`` needs is still stored."""
        return True

    def check_crop(self, row: int, length: int) -> None:  # noqa: B027
        """Refuse what ``crop`` could not do (``InputError``)."""

    def take_transfers(self) -> Transfers:
        """Traffic since the last call."""
        return Transfers()
