"""Blocks of pages: a coarse level that is ranked before the pages are, for contexts whose page summaries are many.

Blocks begin at multiples of their size: with 16 pages each, block b holds pages 16 b to 16 b + 15. The row of a block
merges the rows of its pages (the largest maximum, the smallest minimum), so its score is never below that of a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.kernels.page_summary import SUMMARIES
from kvsift.types import Candidates, KVReader

BLOCK_PAGES = 16  # by default: 256 tokens in pages of 16


@dataclass
class BlockRows:
    """Summary rows of the complete blocks of a sequence, each merged once."""

    kind: str  # of page summary
    page_size: int
    block_pages: int
    rows: Tensor | None = None  # [num_kv_heads, num_blocks, width] in the dtype of the kind; never written in place

    def fork(self) -> BlockRows:
        return BlockRows(self.kind, self.page_size, self.block_pages, self.rows)

    def crop(self, length: int) -> None:
        if self.rows is not None:
            self.rows = self.rows[:, : length // (self.block_pages * self.page_size)]

    def read(self, blocks: range, reader: KVReader) -> Tensor:
        """Rows of whole blocks, [num_kv_heads, len(blocks), width]; merges those that are new."""
        known = 0 if self.rows is None else self.rows.shape[1]
        complete = min(blocks.stop, reader.length // (self.block_pages * self.page_size))
        if known < complete:
            merged = self._merged(known, complete, reader)
            self.rows = merged if self.rows is None else torch.cat([self.rows, merged], 1)  # once per block
        rows = [] if self.rows is None else [reader.counted(self.rows[:, blocks.start : blocks.stop])]
        if complete < blocks.stop:  # window=0: the incomplete page is a candidate, and its block will change
            rows.append(self._merged(max(complete, blocks.start), blocks.stop, reader))
        return torch.cat(rows, 1)

    def _merged(self, first: int, stop: int, reader: KVReader) -> Tensor:
        merge = SUMMARIES[self.kind].merge
        assert merge is not None
        pages = reader.summary(self.kind, slice(first * self.block_pages, stop * self.block_pages))
        return merge(pages.unflatten(1, (stop - first, self.block_pages)))


def whole_blocks(candidates: Candidates, block_pages: int) -> range:
    """Return the blocks whose pages are all candidates."""
    return range(-(-candidates.first // block_pages), candidates.stop // block_pages)


def pages_in(blocks: Tensor, candidates: Candidates, block_pages: int) -> Tensor:
    """Candidate pages in the selected whole blocks, and all candidate pages outside whole blocks.

    blocks int64 [num_heads, count], ascending -> int64 [num_heads, num_pages], ascending.
    """
    whole = whole_blocks(candidates, block_pages)
    pages = torch.arange(candidates.first, candidates.stop, device=blocks.device).expand(blocks.shape[0], -1)
    before, after = whole.start * block_pages - candidates.first, candidates.stop - whole.stop * block_pages
    inside = (blocks.unsqueeze(-1) * block_pages + torch.arange(block_pages, device=blocks.device)).flatten(1)
    return torch.cat([pages[:, :before], inside, pages[:, pages.shape[1] - after :]], 1)
