"""A cache in blocks [num_blocks, num_kv_heads, block_size, width] of any strides, as the pages that kernels read.

Pages get numbers that are linear in memory, so that one stride leads from each to the next in every layout: page i of a
block is ``block * step + i``. Blocks of one page, and those whose tokens follow each other for all heads, have as many
numbers as pages; where each head has its tokens side by side, the pages of the other heads lie between two blocks and
take numbers too, which are not used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.errors import InvalidTensor
from kvsift.kernels.triton_shim import jit, runs_on_triton, tl

CHUNK = 1024  # pages of a program


class BlockPages(NamedTuple):
    """How pages are numbered."""

    block_size: int
    page_size: int
    step: int  # numbers per block

    @classmethod
    def of(cls, cache: Tensor, page_size: int) -> BlockPages:
        """Return the numbers for a cache.

        Raises:
            InputError: if no stride leads from page to page.
        """
        block, _, token, _ = cache.stride()
        block_size = cache.shape[2]
        if block_size == page_size:
            return cls(block_size, page_size, 1)
        if block_size % page_size or block % (page_size * token):
            raise InvalidTensor(
                f"blocks of {block_size} tokens with strides {cache.stride()} are not pages of {page_size} at equal "
                f"distances; take --block-size {page_size}."
            )
        return cls(block_size, page_size, block // (page_size * token))

    @property
    def per_block(self) -> int:
        return self.block_size // self.page_size

    def count(self, num_blocks: int) -> int:
        """Return the numbers of so many blocks."""
        return (num_blocks - 1) * self.step + self.per_block

    def split(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values, side by side in a cache, each [num_kv_heads, count, page_size, head_dim]."""
        block, head, token, number = cache.stride()
        head_dim = cache.shape[3] // 2
        shape = (cache.shape[1], self.count(cache.shape[0]), self.page_size, head_dim)
        strides = (head, block // self.step, token, number)
        first = cache.storage_offset()
        return cache.as_strided(shape, strides, first), cache.as_strided(shape, strides, first + head_dim * number)

    def new_rows(self, num_blocks: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros [heads, count, width], of which no page that is used shares memory with another."""
        if heads * self.per_block > self.step:  # no numbers to spare
            return torch.zeros(heads, self.count(num_blocks), width, dtype=dtype, device=device)
        memory = torch.zeros(num_blocks * self.step * width, dtype=dtype, device=device)
        return memory.as_strided((heads, self.count(num_blocks), width), (self.per_block * width, width, 1))

    def of_slots(self, slots: Tensor) -> Tensor:
        """Return the pages that tokens are in, by slot ``block * block_size + place``."""
        return slots // self.block_size * self.step + slots % self.block_size // self.page_size


def place_pages(
    blocks: Tensor, lengths: Tensor, pages: BlockPages, out: tuple[Tensor, Tensor], totals: Tensor, sparse_from: Tensor
) -> None:
    """Copy what the host of a cache keeps about a step into buffers of our own, and count its queries.

    Args:
        blocks: int32 [batch, max_blocks], physical block of each logical one; the last stride is 1.
        lengths: int32 [batch], tokens cached; 0 for rows that are padding.
        pages: the pages of the cache.
        out: table int32 [batch, max_pages] and lengths int32 [batch], written as far as a row reaches.
        totals: int64 [batch, 4], to which queries, their tokens, sparse queries, and the tokens of those are added.
        sparse_from: int32 [batch], fewest tokens with which a row does not see all of them.
    """
    run = place_pages_triton if runs_on_triton(blocks) else place_pages_reference
    run(blocks, lengths, pages, out, totals, sparse_from)


def place_pages_reference(
    blocks: Tensor, lengths: Tensor, pages: BlockPages, out: tuple[Tensor, Tensor], totals: Tensor, sparse_from: Tensor
) -> None:
    table, own_lengths = out
    page = torch.arange(table.shape[1], device=table.device)
    numbers = blocks.clamp_min(0)[:, page // pages.per_block] * pages.step + page % pages.per_block
    held = page < -(-lengths.unsqueeze(1) // pages.page_size)
    table.copy_(torch.where(held, numbers, table))
    own_lengths.copy_(lengths)
    there, sparse = lengths > 0, lengths >= sparse_from
    totals += torch.stack([there, lengths, sparse, lengths * sparse], 1)


def place_pages_triton(
    blocks: Tensor, lengths: Tensor, pages: BlockPages, out: tuple[Tensor, Tensor], totals: Tensor, sparse_from: Tensor
) -> None:
    table, own_lengths = out
    _place_kernel[len(table), -(-table.shape[1] // CHUNK)](
        blocks, lengths, table, own_lengths, totals, sparse_from, blocks.stride(0), table.stride(0), STEP=pages.step,
        PER_BLOCK=pages.per_block, PAGE=pages.page_size, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip


@jit
def _place_kernel(
    blocks_ptr, lengths_ptr, table_ptr, own_lengths_ptr, totals_ptr, sparse_from_ptr, blocks_row, table_row,
    STEP: tl.constexpr, PER_BLOCK: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0), tl.program_id(1) * CHUNK
    length = tl.load(lengths_ptr + row)
    if first == 0:
        tl.store(own_lengths_ptr + row, length)
        totals_ptr += row * 4
        sparse = (length >= tl.load(sparse_from_ptr + row)).to(tl.int32)
        tl.store(totals_ptr, tl.load(totals_ptr) + (length > 0).to(tl.int32))
        tl.store(totals_ptr + 1, tl.load(totals_ptr + 1) + length)
        tl.store(totals_ptr + 2, tl.load(totals_ptr + 2) + sparse)
        tl.store(totals_ptr + 3, tl.load(totals_ptr + 3) + length * sparse)
    page = first + tl.arange(0, CHUNK)
    held = page < (length + PAGE - 1) // PAGE
    block = tl.load(blocks_ptr + row.to(tl.int64) * blocks_row + page // PER_BLOCK, mask=held, other=0)
    number = tl.maximum(block, 0) * STEP + page % PER_BLOCK  # vLLM's own trial steps have no blocks
    tl.store(table_ptr + row.to(tl.int64) * table_row + page, number, mask=held)
