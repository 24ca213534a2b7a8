"""One measured point of attention: its shape, the bytes that must move, and buffers to launch on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.kernels.page_summary import row_format, summarise
from kvsift.kernels.paged import PagedKV
from kvsift.kernels.sketch import SKETCHES
from kvsift.layer.paged_decode import list_capacity, page_spans
from kvsift.plan.budget import Budget
from kvsift_lab.bench.timing import COLD_BYTES

DTYPE = torch.bfloat16
LARGEST_BYTES = 60 << 30  # of all buffers
SUMMARISED_NUMBERS = 1 << 27  # of keys, summarised at once: workspace is a few times as large


@dataclass(frozen=True)
class AttentionPoint:
    """Attention of one decode step in one layer."""

    num_query_heads: int
    num_kv_heads: int
    context: int  # tokens of every sequence, the query's own included
    batch: int
    head_dim: int
    page_size: int
    budget: int
    sketch_budget: int = 1024

    def __post_init__(self) -> None:
        if self.num_query_heads % self.num_kv_heads:
            raise InputError(
                f"shape {self.num_query_heads}/{self.num_kv_heads}: the query heads must be a multiple of the KV heads."
            )
        if self.context % self.page_size:
            raise InputError(f"context {self.context} must be a multiple of the page size, {self.page_size}.")
        self.rule.check(self.page_size, selects=True)
        self.sketch_rule.check(1, selects=True)

    @property
    def rule(self) -> Budget:
        """The budget of a list, with sinks and window."""
        return Budget(tokens=self.budget)

    @property
    def sketch_rule(self) -> Budget:
        """The budget of a list of tokens."""
        return Budget(tokens=self.sketch_budget)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def group_size(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def max_pages(self) -> int:
        return self.context // self.page_size

    @property
    def capacity(self) -> int:
        """Pages that a list has room for."""
        return list_capacity(self.rule, self.max_pages, self.page_size)

    def spans(self, lengths: Tensor) -> Tensor:
        """Return the page spans of every sequence, int32 [batch, 4]; see ``page_spans``."""
        return page_spans(self.rule, lengths, self.page_size)

    @cached_property
    def counted(self) -> tuple[int, int]:
        """Candidate pages and visible pages of each list."""
        first, stop, selected, total = self.spans(torch.tensor([self.context]))[0].tolist()
        return stop - first, first + selected + total - stop

    @property
    def dense_bytes(self) -> int:
        """Bytes of keys and values of the whole context."""
        return 2 * self.batch * self.num_kv_heads * self.context * self.head_dim * DTYPE.itemsize

    def summary_bytes(self, kind: str) -> int:
        """Bytes of the summary rows of all candidates."""
        width, dtype = row_format(kind, self.head_dim, self.page_size)
        return self.batch * self.num_kv_heads * self.counted[0] * width * (dtype or DTYPE).itemsize

    def sparse_bytes(self, kind: str) -> int:
        """Bytes of the summary rows of all candidates, and of keys and values of the visible tokens."""
        visible = self.counted[1] * self.page_size
        if kind in SKETCHES:
            visible = min(self.sketch_budget, self.context)
        kv = 2 * self.batch * self.num_kv_heads * visible * self.head_dim * DTYPE.itemsize
        return self.summary_bytes(kind) + kv

    def num_sets(self, kinds: list[str], free_bytes: int) -> int:
        """Return how many sets of buffers keep every read cold; at least two.

        Raises:
            InputError: if not even two fit.
        """
        set_bytes = self.dense_bytes + sum(map(self.summary_bytes, kinds))
        if 2 * set_bytes > free_bytes:
            raise InputError(
                f"two sets of buffers need {2 * set_bytes / 2**30:.1f} GiB and {free_bytes / 2**30:.1f} GiB are free"
            )
        cold = ceil(COLD_BYTES / min(map(self.sparse_bytes, kinds))) + 1
        return max(2, min(cold, min(LARGEST_BYTES, free_bytes) // set_bytes))


@dataclass(frozen=True)
class Buffers:
    """Inputs of one launch."""

    queries: Tensor  # [batch, num_query_heads, head_dim]
    kv: PagedKV
    summaries: dict[str, Tensor]  # kind -> [num_kv_heads, num_pages, width]

    @classmethod
    def random(cls, point: AttentionPoint, kinds: list[str], device: torch.device, seed: int) -> Buffers:
        """Return normal numbers; the pages of a sequence are consecutive, so that dense kernels take a view."""
        torch.manual_seed(seed)
        num_pages = point.batch * point.max_pages
        pool = (point.num_kv_heads, num_pages, point.page_size, point.head_dim)
        keys, values = (torch.randn(pool, dtype=DTYPE, device=device) for _ in range(2))
        table = torch.arange(num_pages, dtype=torch.int32, device=device).view(point.batch, -1)
        lengths = torch.full((point.batch,), point.context, dtype=torch.int32, device=device)
        queries = torch.randn(point.batch, point.num_query_heads, point.head_dim, dtype=DTYPE, device=device)
        return cls(
            queries, PagedKV(keys, values, table, lengths), {kind: new_summary(kind, keys, values) for kind in kinds}
        )

    @property
    def dense_keys(self) -> Tensor:
        """[batch, num_kv_heads, context, head_dim], a view."""
        return self._dense(self.kv.keys)

    @property
    def dense_values(self) -> Tensor:
        """[batch, num_kv_heads, context, head_dim], a view."""
        return self._dense(self.kv.values)

    def _dense(self, pool: Tensor) -> Tensor:
        heads = pool.flatten(1, 2).unflatten(1, (self.kv.batch, -1))  # [num_kv_heads, batch, context, head_dim]
        return heads.transpose(0, 1)


def new_summary(kind: str, keys: Tensor, values: Tensor) -> Tensor:
    """Return the summary rows of all pages of a pool, [num_kv_heads, num_pages, width]."""
    width, dtype = row_format(kind, keys.shape[3], keys.shape[2])
    rows = keys.new_empty(*keys.shape[:2], width, dtype=dtype or keys.dtype)
    fill_summary(kind, keys, values, rows)
    return rows


def fill_summary(kind: str, keys: Tensor, values: Tensor, rows: Tensor) -> None:
    """Write the summary rows of all pages of a pool, some pages at a time; every token counts."""
    num_kv_heads, num_pages, page_size, head_dim = keys.shape
    step = max(1, SUMMARISED_NUMBERS // (num_kv_heads * page_size * head_dim))
    valid = torch.ones(step, page_size, dtype=torch.bool, device=keys.device)
    for start in range(0, num_pages, step):
        pages = slice(start, min(start + step, num_pages))
        rows[:, pages] = summarise(kind, keys[:, pages], valid[: pages.stop - start], values[:, pages])
