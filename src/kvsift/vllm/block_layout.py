"""Where vLLM's kernels put the numbers of a block, found by letting them write one.

On a CPU the order depends on the instruction set: keys are transposed within a block on most, so a kernel that writes
is the only description that holds for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvsift.errors import InputError

Write = Callable[[Tensor, Tensor, Tensor, Tensor], None]  # keys, values, cache, slots
BASE = 128  # digits that every dtype of a cache holds exactly


class BlockLayout(NamedTuple):
    """Places of the numbers of a token within a block of one KV head."""

    keys: Tensor  # int64 [block_size, head_dim]
    values: Tensor  # int64 [block_size, head_dim]

    @property
    def block_size(self) -> int:
        return self.keys.shape[0]

    @classmethod
    def find(cls, cache: Tensor, write: Write) -> BlockLayout:
        """Return the layout of a cache [num_blocks, num_kv_heads, block_size, 2 * head_dim] that ``write`` fills.

        ``write`` takes keys and values [block_size, num_kv_heads, head_dim] and slots int64 [block_size].

        Raises:
            InputError: if it does not write every number to a place of its own.
        """
        _, heads, block_size, width = cache.shape
        shape = (block_size, width // 2)
        ids = torch.arange(1, block_size * width + 1).view(2, *shape)  # of keys, then of values; 0 is never written
        seen = torch.zeros(block_size * width, dtype=torch.int64)
        for power in range(3):
            digits = (ids // BASE**power % BASE).to(cache.dtype).unsqueeze(2).expand(2, block_size, heads, shape[1])
            scratch = torch.zeros(2, *cache.shape[1:], dtype=cache.dtype)
            write(digits[0].contiguous(), digits[1].contiguous(), scratch, torch.arange(block_size) + block_size)
            seen += scratch[1, -1].flatten().to(torch.int64) * BASE**power
        order = seen.argsort()
        if not torch.equal(seen[order], ids.flatten()):
            raise InputError(
                "this vLLM packs the numbers of its KV cache in a way that kvsift does not know. Take --dtype float32, "
                "or start vLLM without the kvsift settings."
            )
        return cls(*order.view(2, *shape))

    def read(self, cache: Tensor, order: Tensor, blocks: Tensor, offsets: Tensor, heads: Tensor) -> Tensor:
        """Return numbers of tokens, [..., head_dim]; ``order`` is ``keys`` or ``values``.

        blocks, offsets, heads int64 that broadcast to [...]: the block of each token, its place in it, and its head.
        """
        numbers = cache.view(-1)  # raises where this would be a copy of the cache
        in_block = cache.shape[2] * cache.shape[3]
        places = ((blocks * cache.shape[1] + heads) * in_block).unsqueeze(-1) + order[offsets]
        return numbers.index_select(0, places.flatten()).view(places.shape)  # twice as fast as numbers[places]
