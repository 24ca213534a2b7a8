"""Keys in 8 bits per number, laid out for a scan.

key[j] is about centre[j] + scale[j] * (code - 128), with a centre and a scale per KV head and channel, so that a few
large channels cost the others nothing. A query takes the scales into its own numbers; the centres add the same to every
key and do not change their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsift.errors import InputError
from kvsift.native.shapes import check_rows

ROWS = 16  # per block: one register of 32-bit sums, 4 channels at a time
LARGEST = 2.0**120  # of a number that is coded: sums of two are finite in float32
MARGIN = 1.25  # by how much a range is widened when keys fall outside: not again for each new token
_CHUNK = 8192  # rows that are coded at a time, bounding what is needed besides


@dataclass
class Codes:
    """Codes of one layer and sequence.

    Attributes:
        blocks: uint8 [num_kv_heads, capacity, head_dim / 4, 16, 4], block b holding the keys 16 b to 16 b + 15.
        scale: float32 [num_kv_heads, head_dim], the step of a channel.
        centre: float32 [num_kv_heads, head_dim].
        length: keys coded so far.
    """

    blocks: Tensor
    scale: Tensor
    centre: Tensor
    length: int

    @classmethod
    def of(cls, keys: Tensor) -> Codes:
        """Codes of keys [num_kv_heads, n, head_dim], bf16 or float32."""
        check_rows("keys", keys)
        heads, _, dim = keys.shape
        empty = torch.zeros(heads, dim)
        codes = cls(torch.empty(heads, 0, dim // 4, ROWS, 4, dtype=torch.uint8), empty, empty.clone(), 0)
        codes.extend(keys)
        return codes

    def extend(self, keys: Tensor) -> None:
        """Code the keys beyond ``length``; keys are all of them, [num_kv_heads, n, head_dim].

        A KV head whose new keys leave its range is coded anew, all of it, over a range that is wider by MARGIN.
        """
        check_rows("keys", keys)
        heads, n, dim = keys.shape
        if (heads, dim) != tuple(self.scale.shape) or n < self.length:
            raise InputError(
                f"keys are {list(keys.shape)}; codes hold {self.length} keys of {list(self.scale.shape)} channels, "
                "and grow by keys that come after these. Call crop(length) first if keys were removed."
            )
        if n == self.length:
            return
        self._reserve(n)
        new = keys[:, self.length :]
        top, bottom = new.amax(1).float(), new.amin(1).float()  # [num_kv_heads, head_dim]
        if not (torch.maximum(top, -bottom) <= LARGEST).all():
            top, bottom = self._coded_extremes(new)
        reach = 127 * self.scale
        outside = (top > self.centre + reach) | (bottom < self.centre - reach)
        for head in range(heads):
            start = self.length
            if start == 0 or bool(outside[head].any()):
                top[head] = torch.maximum(top[head], (self.centre + reach)[head]) if start else top[head]
                bottom[head] = torch.minimum(bottom[head], (self.centre - reach)[head]) if start else bottom[head]
                self.centre[head] = (top[head] + bottom[head]) / 2
                widened = torch.where(outside[head], MARGIN, 1.0) if start else 1.0
                self.scale[head] = ((top[head] - bottom[head]) / 2 / 127 * widened).clamp_min(1e-30)
                start = 0
            self._write(head, keys[head], start)
        self.length = n

    def crop(self, length: int) -> None:
        """Keys from ``length`` on are gone."""
        self.length = min(self.length, length)

    def fork(self) -> Codes:
        """A copy that shares nothing."""
        used = (self.length + ROWS - 1) // ROWS
        return Codes(self.blocks[:, :used].clone(), self.scale.clone(), self.centre.clone(), self.length)

    @property
    def nbytes(self) -> int:
        """Bytes held, unused capacity included."""
        return self.blocks.numel() + 2 * self.scale.numel() * 4

    def _coded_extremes(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The largest and smallest number of each channel that has a code of its own. Infinities and what is nearly as
        large would make every other code of their channel the same; they get the outermost ones."""
        coded = keys.abs() <= LARGEST  # no NaN either
        top, bottom = keys.masked_fill(~coded, -torch.inf).amax(1), keys.masked_fill(~coded, torch.inf).amin(1)
        some = coded.any(1)
        return torch.where(some, top.float(), self.centre), torch.where(some, bottom.float(), self.centre)

    def _reserve(self, length: int) -> None:
        needed = (length + ROWS - 1) // ROWS
        if needed <= self.blocks.shape[1]:
            return
        capacity = needed if self.length == 0 else max(needed, 2 * self.blocks.shape[1])
        grown = self.blocks.new_zeros(self.blocks.shape[0], capacity, *self.blocks.shape[2:])
        grown[:, : self.blocks.shape[1]] = self.blocks
        self.blocks = grown

    def _write(self, head: int, keys: Tensor, start: int) -> None:
        """Code keys [n, head_dim] of one head from ``start`` on."""
        flat = self.blocks[head].permute(0, 2, 1, 3)  # [capacity, 16, head_dim / 4, 4]
        for first in range(start - start % ROWS, keys.shape[0], _CHUNK):
            rows = keys[first : first + _CHUNK].float()
            code = ((rows - self.centre[head]) / self.scale[head]).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
            whole = torch.nn.functional.pad(code, (0, 0, 0, -code.shape[0] % ROWS))
            block = first // ROWS
            flat[block : block + whole.shape[0] // ROWS] = whole.view(-1, ROWS, keys.shape[1] // 4, 4)
